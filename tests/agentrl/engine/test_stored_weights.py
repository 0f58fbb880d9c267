"""An engine loads a version from object storage when its host has no folder of it, and from the folder otherwise."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.configs.config_files import parse_config
from agentrl.configs.publish_config import StorageConfig
from agentrl.engine import stored_weights
from agentrl.engine.prepared.version_host import VersionHost
from agentrl.engine.sglang.keyed_sglang import guard
from agentrl.engine.sglang.sglang_command import environment
from agentrl.engine.stored_weights import STORED_WEIGHTS, StoredWeights
from agentrl.launch.engine_specs import engine_spec
from agentrl.storage import object_store, stored_folders
from agentrl.storage.object_store import ObjectStore
from agentrl.versions.version_cache import VersionCache

NAME = "v12-01a2"


def tensors_of(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.glob("*.safetensors")}


class Engine:
    """SGLang's route, which says what it got, behind the middleware."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(object_store, "PAUSES_S", ())
        self.folder = folder
        self.here = folder / "run" / "weights" / NAME
        self.here.mkdir(parents=True)
        (self.here / "model.safetensors").write_bytes(b"tensors")
        self.store = ObjectStore(f"file://{folder}/store")
        app = Starlette(routes=[Route("/update_weights_from_disk", self.load, methods=["POST"])])
        storage = StorageConfig(cache_dir=folder / "cache")
        host = VersionHost(VersionCache(folder / "versions", 1 << 20), "k")
        guard(app, "k", host, StoredWeights(url=self.store.url, storage=storage))
        self.client = TestClient(app, headers={"Authorization": "Bearer k"})

    async def load(self, request: Request) -> JSONResponse:
        body = await request.json()
        found = await asyncio.to_thread(tensors_of, Path(body["model_path"]))
        return JSONResponse({"success": True, "body": body, "found": found})

    def ask(self, path: Path | str) -> Any:
        return self.client.post("/update_weights_from_disk", json={"model_path": str(path), "weight_version": "12"})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(tmp_path, monkeypatch)


def test_an_absent_version_is_loaded_from_the_storage(engine):
    stored_folders.upload(engine.store, engine.here, NAME)
    answer = engine.ask(f"/no/such/folder/{NAME}").json()
    assert answer["found"] == {"model.safetensors": "tensors"}
    assert Path(answer["body"]["model_path"]).parent == engine.folder / "cache"
    assert answer["body"]["weight_version"] == "12"


def test_a_local_version_is_read_from_its_folder(engine):
    answer = engine.ask(engine.here).json()
    assert answer["body"]["model_path"] == str(engine.here)
    assert not (engine.folder / "cache").exists()


def test_a_folder_of_no_version_is_passed_on_to_sglang(engine):
    assert engine.ask("/no/such/model").json()["body"]["model_path"] == "/no/such/model"


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"model_path": 3}', b"[" * 100_000], ids=len)
def test_a_body_that_cannot_be_read_names_no_version(body):
    assert stored_weights._absent_version(body) is None


@pytest.mark.parametrize("state", ["absent", "incomplete", "changed"])
def test_a_version_that_cannot_be_copied_is_refused_as_sglang_does(engine, state):
    if state != "absent":
        stored_folders.upload(engine.store, engine.here, NAME)
    if state == "incomplete":
        engine.store.delete(f"{NAME}/MANIFEST.json")
    if state == "changed":
        engine.store.write(f"{NAME}/model.safetensors", b"tensorx")
    answer = engine.ask(f"/no/such/folder/{NAME}")
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert f"has no folder of {NAME}, and: {engine.store.url}/{NAME}" in answer.json()["message"]


def test_the_key_is_checked_before_anything_is_copied(engine):
    stored_folders.upload(engine.store, engine.here, NAME)
    body = {"model_path": f"/no/such/folder/{NAME}"}
    answer = engine.client.post("/update_weights_from_disk", json=body, headers={"Authorization": "Bearer x"})
    assert answer.status_code == 401
    assert not (engine.folder / "cache").exists()


def test_a_large_body_is_refused(engine, monkeypatch):
    monkeypatch.setattr(stored_weights, "MOST_BYTES", 10)
    assert "larger than 10 bytes" in engine.ask(engine.here).json()["message"]


def test_an_engine_of_a_run_knows_where_its_versions_are(tmp_path):
    storage = {"url": "s3://bucket/a", "weights": True, "cache_dir": str(tmp_path)}
    config = parse_config({"name": "math", "model": "tiny", "storage": storage, "engine": {"device": "cpu"}})
    spec = engine_spec(config, tmp_path, 0, port=1, log_file=tmp_path / "log")
    assert spec.stored_weights is not None
    assert spec.stored_weights.url == "s3://bucket/a/math/weights"
    assert stored_weights.stored_weights(environment(spec)[STORED_WEIGHTS]) == spec.stored_weights
    with pytest.raises(ValueError, match=STORED_WEIGHTS):
        stored_weights.stored_weights(json.dumps({"url": 1}))
    config = parse_config({"name": "math", "model": "tiny", "engine": {"device": "cpu"}})
    assert engine_spec(config, tmp_path, 0, port=1, log_file=tmp_path / "log").stored_weights is None
