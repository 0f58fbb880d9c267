"""The URL of object storage: a bucket or a folder, never a key."""

from __future__ import annotations

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.errors import ConfigError


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b/", "file:///shared/folder"])
def test_a_url_is_kept_without_its_last_slash(url: str) -> None:
    config = parse_config({"name": "r", "model": "tiny", "storage": {"url": url}})
    assert config.storage.url == url.rstrip("/")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://a", "must be s3://BUCKET/PREFIX or file:///FOLDER"),
        ("s3:///a", "must be s3://BUCKET"),
        ("s3://bucket/../other", "must be s3://BUCKET"),
        ("s3://bucket?versionId=1", "must be s3://BUCKET"),
        ("file://host/folder", "must be s3://BUCKET"),
        ("/folder", "must be s3://BUCKET"),
        ("s3://AKIA:hidden@bucket", "must not contain a key"),
    ],
)
def test_another_url_is_refused_in_one_line(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        parse_config({"name": "r", "model": "tiny", "storage": {"url": url}})
    assert "storage.url" in str(refused.value)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": {"weights": True}}, "weights: true needs storage.url"),
        (
            {
                "storage": {"url": "s3://bucket", "weights": True},
                "trainer": {"lora": {"rank": 4, "publish": "adapter"}},
            },
            r"storage\.weights: engines read adapters from the run's folder: set lora\.publish: merged",
        ),
    ],
)
def test_weights_need_a_place_and_all_tensors(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"name": "r", "model": "tiny"} | changes)
