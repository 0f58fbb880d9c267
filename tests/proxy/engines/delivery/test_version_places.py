"""Where a proxy tells engines to read a version."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.own_address import ADDRESS
from agentrl.proxy.engines.delivery.version_places import VersionPlaces, places_of
from agentrl.versions.read_tokens import is_read_token
from agentrl.versions.version_sources import SOURCE_SPECS

BASE = {"name": "r", "model": "tiny", "agent": "a:A", "tasks": "a:t"}
FOLDER = Path("/disk/r/weights/v3-a")
NEAR, FAR = "http://127.0.0.1:30000", "http://10.0.0.7:30000"


def places(listens: tuple[str, int] | None = ("127.0.0.1", 8080), **config: Any) -> VersionPlaces:
    return places_of(parse_config(BASE | config), "admin-key", listens)


def test_sources_are_the_folder_other_engines_storage_and_the_proxy() -> None:
    peer = {"kind": "http", "url": "http://peer/agentrl/versions", "token": "t"}
    found = places(storage={"url": "s3://bucket/runs", "weights": True}).sources(FOLDER, NEAR, [peer])
    assert found[:3] == [
        {"kind": "folder", "root": "/disk/r/weights"},
        peer,
        {"kind": "storage", "url": "s3://bucket/runs/r/weights"},
    ]
    assert (found[3]["kind"], found[3]["url"]) == ("http", "http://127.0.0.1:8080/versions")
    now = time.time()
    may_read = [is_read_token(found[3]["token"], "admin-key", name, now) for name in ("v3-a", "v2-x", "v4-b")]
    assert may_read == [True, True, False]


@pytest.mark.parametrize(
    ("listens", "public_url", "engine", "url"),
    [
        (("127.0.0.1", 8080), None, NEAR, "http://127.0.0.1:8080"),
        (("127.0.0.1", 8080), None, FAR, None),  # it does not reach the proxy's loopback
        (("0.0.0.0", 8080), None, FAR, "http://10.9.8.7:8080"),
        (("::", 8080), None, FAR, "http://10.9.8.7:8080"),
        (("10.0.0.1", 8080), None, FAR, "http://10.0.0.1:8080"),
        (("fd00::1", 8080), None, FAR, "http://[fd00::1]:8080"),
        (("127.0.0.1", 8080), "https://proxy.example", FAR, "https://proxy.example"),
        (None, None, NEAR, None),
        (("0.0.0.0", 8080), None, "http://no-such-host.invalid:1", "http://10.9.8.7:8080"),
    ],
)
def test_the_address_of_the_proxy_as_an_engine_reaches_it(
    monkeypatch: pytest.MonkeyPatch, listens: Any, public_url: str | None, engine: str, url: str | None
) -> None:
    monkeypatch.setenv(ADDRESS, "10.9.8.7")
    assert places(listens, proxy={"public_url": public_url}).address(engine) == url


def test_a_proxy_without_an_address_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    unknown = places(("0.0.0.0", 8080)).sources(FOLDER, "http://no-such-host.invalid:1", [])
    assert [source["kind"] for source in unknown] == ["folder"]


def test_a_version_may_be_prepared_if_it_has_a_manifest_or_only_others_see_its_folder(tmp_path: Path) -> None:
    at = replace(places(), weights=tmp_path)
    assert at.may_have(tmp_path / "v1-a")
    (tmp_path / "v1-a").mkdir()
    assert not at.may_have(tmp_path / "v1-a")  # an adapter, or the tensors of an old version
    (tmp_path / "v1-a" / "version.json").write_text("{}")
    assert at.may_have(tmp_path / "v1-a")


PEER = {"kind": "http", "url": "http://peer/agentrl/versions", "token": "t"}


def test_a_mooncake_store_comes_first_and_the_folder_is_not_used_in_place() -> None:
    stored = places(publish={"mooncake": {"master": "moon-0:50051", "segment_gb": 1.0}})
    assert stored.serves_many
    found = SOURCE_SPECS.validate_python(stored.sources(FOLDER, NEAR, [PEER]))
    assert [spec.kind for spec in found] == ["mooncake", "folder", "http", "http"]
    assert (found[0].master, found[0].prefix, found[1].in_place) == ("moon-0:50051", "agentrl/r", False)
    assert not places().serves_many


def test_memory_of_other_engines_comes_before_http() -> None:
    found = places(publish={"peers": "nixl"}).sources(FOLDER, NEAR, [PEER])
    assert found[1:3] == [PEER | {"kind": "nixl"}, PEER]
    assert len(SOURCE_SPECS.validate_python(found)) == 4
