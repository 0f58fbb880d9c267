"""A server is not asked to load a folder that does not fit; everything else reaches it unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.folder_guard import CHECKS, ChecksFolders
from agentrl.versions.weights_folder import ADAPTER


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A folder with an adapter, whose tensors are also those of a model that this host does not have."""
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    pair = {"base_model.model.x.lora_A.weight": np.zeros((2, 4)), "base_model.model.x.lora_B.weight": np.zeros((3, 2))}
    save_file(pair, tmp_path / ADAPTER)
    return tmp_path


@pytest.fixture
def client() -> TestClient:
    async def took(request: Request) -> JSONResponse:
        return JSONResponse({"took": (await request.body()).decode()})

    routes = [Route(path, took, methods=["POST"]) for path in (*CHECKS, "/other")]
    guard = Middleware(ChecksFolders, checks=LoadChecks(Path("/absent")))
    return TestClient(Starlette(routes=routes, middleware=[guard]))


@pytest.mark.parametrize("path", CHECKS)
def test_a_folder_that_does_not_fit_is_refused_with_the_reason(client: TestClient, path: str, good: Path) -> None:
    field = CHECKS[path][0]
    answer = client.post(path, json={field: "/runs/v1", "name": "v1"})
    assert answer.status_code == 400
    assert answer.json() == {"success": False, "message": "no such folder: /runs/v1"}
    body = json.dumps({field: str(good)})
    assert client.post(path, content=body).json() == {"took": body}
    assert client.post(path, content=b" " * (1 << 21)).status_code == 400


@pytest.mark.parametrize("body", ['{"model_path": 3}', "{}", "[]", "no JSON", "", "[" * 100_000], ids=range(6))
def test_the_server_refuses_nonsense_itself(client: TestClient, body: str) -> None:
    assert client.post("/update_weights_from_disk", content=body).json() == {"took": body}


def test_other_routes_are_not_checked(client: TestClient) -> None:
    assert client.post("/other", json={"model_path": "/runs/v1"}).status_code == 200
