"""A dataset in object storage is read through the cache; one that changed is read again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from agentrl.configs.publish_config import StorageConfig
from agentrl.data.task_stream import load_tasks
from agentrl.errors import ConfigError, StorageError, UserError
from agentrl.storage import datasets
from agentrl.storage.object_store import ObjectStore

LINES = b'{"n": 1}\n{"n": 2}\n'


@pytest.fixture
def config(tmp_path: Path) -> StorageConfig:
    return StorageConfig(cache_dir=tmp_path / "cache")


def test_a_dataset_is_downloaded_once_until_it_changes(bucket, s3, config):
    ObjectStore(bucket).write("d/tasks.jsonl", LINES)
    s3.requests.clear()
    for _ in range(2):
        with datasets.opened(f"{bucket}/d/tasks.jsonl", config, "tasks") as found:
            assert found.path.read_bytes() == LINES
            assert found.facts.sha256 == hashlib.sha256(LINES).hexdigest()
    assert len([request for request in s3.requests if request.startswith("GET")]) == 1
    ObjectStore(bucket).write("d/tasks.jsonl", LINES * 2)
    with datasets.opened(f"{bucket}/d/tasks.jsonl", config, "tasks") as found:
        assert found.path.read_bytes() == LINES * 2


def test_an_absent_dataset_is_named(bucket, config):
    with (
        pytest.raises(ConfigError, match=rf"evaluation\.tasks: {bucket}/none\.jsonl does not exist"),
        datasets.opened(f"{bucket}/none.jsonl", config, "evaluation.tasks"),
    ):
        pass


@pytest.mark.parametrize("url", ["memory://a/b.jsonl", "https://host/b.jsonl", "s3://key:secret@bucket/b.jsonl"])
def test_another_kind_of_url_is_refused(url, config):
    with pytest.raises(ConfigError, match="tasks: must"), datasets.opened(url, config, "tasks"):
        pass


def test_tasks_are_loaded_from_a_bucket_and_errors_name_the_object(bucket, config):
    url = f"{bucket}/tasks.jsonl"
    ObjectStore(bucket).write("tasks.jsonl", LINES)
    assert load_tasks(url, limit=9, storage=config) == {"tasks": [{"n": 1}, {"n": 2}]}
    assert load_tasks(url, limit=1, storage=config) == {"tasks": [{"n": 1}]}
    ObjectStore(bucket).write("tasks.jsonl", b"nonsense\n")
    with pytest.raises(UserError, match=rf"tasks: {url} line 1 is not JSON"):
        load_tasks(url, limit=9, storage=config)


def test_a_dataset_that_changes_while_it_is_read_is_refused_and_read_anew(tmp_path, config, monkeypatch):
    url = f"file://{tmp_path}/d/tasks.jsonl"
    store = ObjectStore(f"file://{tmp_path}/d")
    store.write("tasks.jsonl", LINES)
    download = ObjectStore.download

    def overtaken(self: ObjectStore, key: str, target: Path) -> None:
        download(self, key, target)
        store.write("tasks.jsonl", LINES * 2)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "download", overtaken)
        with (
            pytest.raises(StorageError, match=rf"tasks: {url} changed while it was read"),
            datasets.opened(url, config, "tasks"),
        ):
            pytest.fail("opened")
    with datasets.opened(url, config, "tasks") as found:
        assert found.path.read_bytes() == LINES * 2
