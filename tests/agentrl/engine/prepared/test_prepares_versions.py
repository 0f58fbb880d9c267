"""The middleware in front of SGLang's app: orders to scripted schedulers, keys, and servers that cannot prepare."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from version_folders import tensors, write_version

from agentrl.configs.config_files import parse_config
from agentrl.configs.publish_config import StorageConfig
from agentrl.engine.control.preparation import UNDEFINED
from agentrl.engine.prepared.scheduler_stager import answers_in
from agentrl.engine.prepared.version_host import VERSION_CACHE, CacheSpec, VersionHost, cache_spec, version_cache
from agentrl.engine.sglang.keyed_sglang import guard
from agentrl.engine.sglang.sglang_command import environment
from agentrl.errors import EngineError
from agentrl.launch.engine_specs import engine_spec
from agentrl.versions.read_tokens import read_token
from agentrl.versions.transports.window_answer import WINDOW_TYPE, read_window
from agentrl.versions.version_cache import VersionCache
from tests import fake_nixl

KEY = "k" * 20


class Engine:
    """SGLang's control routes for two replicas, behind the middleware of an engine with a key."""

    def __init__(self, root: Path) -> None:
        self.manifest = write_version(root / "weights", "v1-a", tensors(np.random.default_rng(1)))
        self.weights = root / "weights"
        self.actions: list[str] = []
        self.labels: list[str] = []
        self.plugin = True
        self.states = ["ready", "ready"]
        self.swaps: list[Any] = [True, True]
        routes = [("/weights_checker", self.check), ("/update_weight_version", self.label), ("/other", self.other)]
        routes.append(("/update_weights_from_disk", self.other))
        app = Starlette(routes=[Route(path, work, methods=["POST"]) for path, work in routes])
        guard(app, KEY, VersionHost(VersionCache(root / "cache", 1 << 20), KEY))
        self.client = TestClient(app, headers={"Authorization": f"Bearer {KEY}"})

    async def check(self, request: Request) -> JSONResponse:
        action = (await request.json())["action"].removeprefix("agentrl:")
        self.actions.append(action.partition(" ")[0])
        if not self.plugin:
            return JSONResponse({"success": False, "message": "Unsupported action"}, 400)
        if action.startswith("swap"):
            answers = [{"swapped": done, "error": None if done else "why", "swap_s": 0.001} for done in self.swaps]
        elif action == "digests":
            answers = [{"ranks": [{"a": "1"}]} for _ in self.swaps]
        else:
            named = "v1-a" if action.startswith("stage") else None
            answers = [{"state": s, "name": named, "error": None, "stage_s": 0.1} for s in self.states]
            if action == "discard":
                answers = [a | {"state": "none"} for a in answers]
        return JSONResponse({"success": True, "message": " | ".join(json.dumps(answer) for answer in answers)})

    async def label(self, request: Request) -> JSONResponse:
        self.labels.append((await request.json())["new_version"])
        return JSONResponse({"success": True})

    async def other(self, request: Request) -> JSONResponse:
        return JSONResponse({"passed": True})

    def order(self, **changes: Any) -> dict[str, Any]:
        source = {"kind": "folder", "root": str(self.weights), "in_place": False}
        body = {"version": 1, "name": "v1-a", "checksum": self.manifest.checksum, "sources": [source]}
        return body | changes

    def prepare(self, **changes: Any) -> dict[str, Any]:
        """Prepare version 1; returns how it ended."""
        assert self.client.post("/agentrl/prepare", json=self.order(**changes)).status_code == 202
        while (found := self.client.get("/agentrl/prepared").json())["state"] in ("fetching", "staging"):
            time.sleep(0.01)
        return dict(found)

    def swap(self) -> Any:
        return self.client.post("/agentrl/swap", json={"version": 1, "name": "v1-a", "flush_cache": True})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    with made.client:  # one event loop for all requests
        yield made


def test_a_version_is_fetched_staged_and_swapped_in_all_replicas(engine: Engine) -> None:
    found = engine.prepare(digests=True)
    assert (found["state"], found["error"]) == ("ready", None)
    assert found["bytes"] > 0
    assert engine.client.get("/agentrl/prepared/digests").json() == {"name": "v1-a", "ranks": [{"a": "1"}, {"a": "1"}]}
    answer = engine.swap()
    assert (answer.status_code, answer.json()) == (200, {"success": True, "swap_s": 0.001})
    assert engine.labels == ["1"]
    assert engine.actions == ["staged", "discard", "stage", "digests", "swap"]


@pytest.mark.parametrize("states", [["ready", "failed"], ["none", "ready"]], ids=["failed", "lost"])
def test_a_version_is_not_ready_before_all_replicas_have_staged_it(engine: Engine, states: list[str]) -> None:
    engine.states = states
    found = engine.prepare()
    assert found["state"] == "failed"
    assert "v1-a was not staged" in found["error"]
    assert engine.swap().status_code == 409


def test_a_swap_that_no_replica_did_changes_nothing_and_may_be_repeated(engine: Engine) -> None:
    engine.prepare()
    engine.swaps = [False, False]
    assert engine.swap().status_code == 409
    assert engine.labels == []
    engine.swaps = [True, True]
    assert engine.swap().status_code == 200


@pytest.mark.parametrize("swaps", [[True, False], [True, None], [False, None]], ids=range(3))
def test_a_swap_that_only_some_replicas_did_leaves_no_version(engine: Engine, swaps: list[Any]) -> None:
    engine.prepare()
    engine.swaps = swaps
    answer = engine.swap()
    assert (answer.status_code, answer.json()["success"]) == (500, False)
    assert engine.labels == [UNDEFINED]
    assert engine.swap().status_code == 409


def test_a_server_without_the_plugin_has_no_such_routes(engine: Engine) -> None:
    engine.plugin = False
    assert engine.client.get("/agentrl/prepared").status_code == 404
    assert engine.client.post("/agentrl/prepare", json=engine.order()).status_code == 404
    assert engine.client.post("/other").json() == {"passed": True}


def test_other_weights_make_a_preparation_void(engine: Engine) -> None:
    engine.prepare()
    assert engine.client.post("/update_weights_from_disk").json() == {"passed": True}
    assert engine.client.get("/agentrl/prepared").json()["state"] == "none"


def test_the_routes_need_the_engine_s_key_and_versions_a_token(engine: Engine) -> None:
    engine.prepare()
    none = {"Authorization": ""}
    assert engine.client.get("/agentrl/prepared", headers=none).status_code == 401
    path = "/agentrl/versions/v1-a/version.json"
    token = read_token(KEY, "v1-a", int(time.time()) + 60)
    assert engine.client.get(path, headers={"Authorization": f"Bearer {token}"}).status_code == 200
    assert engine.client.get(path, headers=none).status_code in (401, 403)
    assert engine.client.post(path, headers=none).status_code == 401


def test_windows_of_memory_need_a_token_too(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", fake_nixl.module(fake_nixl.Network()))
    engine.prepare()
    path = "/agentrl/versions/v1-a/version.json"
    token = read_token(KEY, "v1-a", int(time.time()) + 60)
    headers = {"Authorization": f"Bearer {token}", "Accept": WINDOW_TYPE, "Range": "bytes=0-9"}
    window = read_window(engine.client.get(path, headers=headers).content)
    assert window.size == 10
    for method in ("GET", "DELETE"):
        assert engine.client.request(method, path, headers=headers | {"Authorization": "Bearer x"}).status_code == 403
    assert engine.client.delete(path, params={"window": window.id}, headers=headers).status_code == 204
    assert engine.client.delete("/other", headers=headers).status_code == 401


def test_a_large_body_is_refused(engine: Engine) -> None:
    assert engine.client.post("/agentrl/prepare", content=b"x" * (2 << 20)).status_code == 400


def test_answers_of_several_replicas_are_told_apart() -> None:
    assert answers_in('{"a": " | "} | {"b": 1}') == [{"a": " | "}, {"b": 1}]
    with pytest.raises(EngineError, match="answered"):
        answers_in("Unsupported action")


def test_the_cache_of_versions_lies_beside_that_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    assert cache_spec(StorageConfig()).root == tmp_path / "storage-versions"
    spec = cache_spec(StorageConfig(cache_dir=tmp_path / "files", cache_gb=2))
    assert spec == CacheSpec(root=tmp_path / "files-versions", limit_bytes=2 * 10**9)
    assert isinstance(version_cache(spec.model_dump_json()), VersionCache)
    with pytest.raises(ValueError, match=VERSION_CACHE):
        version_cache('{"root": 1}')


def test_an_engine_of_a_run_keeps_versions_where_the_run_says(tmp_path: Path) -> None:
    storage = {"cache_dir": str(tmp_path / "files")}
    config = parse_config({"name": "math", "model": "tiny", "storage": storage, "engine": {"device": "cpu"}})
    spec = engine_spec(config, tmp_path, 0, port=1, log_file=tmp_path / "log")
    assert CacheSpec.model_validate_json(environment(spec)[VERSION_CACHE]).root == tmp_path / "files-versions"
