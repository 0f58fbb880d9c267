"""The order in which an engine is told to read a version."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agentrl.configs.publish_config import MooncakeConfig
from agentrl.proxy.engines.delivery.version_places import VersionPlaces
from agentrl.versions.transports.mooncake_source import mooncake_spec
from agentrl.versions.version_sources import SOURCE_SPECS

PEER = {"kind": "http", "url": "http://peer/agentrl/versions", "token": "t"}


def kinds(places: VersionPlaces) -> list[str]:
    folder = places.weights / "v1-a"
    found = SOURCE_SPECS.validate_python(places.sources(folder, "http://127.0.0.1:1", [PEER]))
    return [spec.kind for spec in found]


def test_a_folder_and_peers(places: VersionPlaces) -> None:
    assert kinds(places) == ["folder", "http"]
    assert not places.serves_many


def test_storage_and_this_proxy_come_last(places: VersionPlaces) -> None:
    wide = replace(places, storage_url="file:///stored", address=lambda url: "http://proxy")
    assert kinds(wide) == ["folder", "http", "storage", "http"]
    assert wide.serves_many


def test_a_mooncake_store_comes_first_and_the_folder_is_not_used_in_place(places: VersionPlaces) -> None:
    stored = replace(places, mooncake=mooncake_spec(MooncakeConfig(master="moon-0:50051"), "run"))
    assert kinds(stored) == ["mooncake", "folder", "http"]
    assert stored.serves_many
    mooncake, folder, _ = stored.sources(Path("/weights/v1-a"), "http://127.0.0.1:1", [PEER])
    assert mooncake["prefix"] == "agentrl/run"
    assert not folder["in_place"]


def test_memory_of_peers_comes_before_http(places: VersionPlaces) -> None:
    assert kinds(replace(places, reads_memory=True)) == ["folder", "nixl", "http"]
