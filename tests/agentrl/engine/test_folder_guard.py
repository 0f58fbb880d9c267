"""A server is not asked to load a folder that does not fit; everything else reaches it unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from agentrl.engine.checks.load_checks import LoadChecks
from agentrl.engine.folder_guard import CHECKS, ChecksFolders
from agentrl.errors import ModelFolderError


class Checks(LoadChecks):
    """Lets one folder pass."""

    def __init__(self) -> None:
        pass

    def checkpoint(self, folder: Path) -> None:
        if folder.name != "good":
            raise ModelFolderError(f"{folder} is of another model")

    adapter = checkpoint


@pytest.fixture
def client() -> TestClient:
    async def took(request: Request) -> JSONResponse:
        return JSONResponse({"took": (await request.body()).decode()})

    routes = [Route(path, took, methods=["POST"]) for path in (*CHECKS, "/other")]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(ChecksFolders, checks=Checks())]))


@pytest.mark.parametrize("path", CHECKS)
def test_a_folder_that_does_not_fit_is_refused_with_the_reason(client: TestClient, path: str) -> None:
    field = CHECKS[path][0]
    answer = client.post(path, json={field: "/runs/v1", "name": "v1"})
    assert answer.status_code == 400
    assert answer.json() == {"success": False, "message": "/runs/v1 is of another model"}
    assert client.post(path, json={field: "/runs/good"}).status_code == 200
    assert client.post(path, content=b" " * (1 << 21)).status_code == 400


@pytest.mark.parametrize("body", ['{"model_path": "/runs/good"}', '{"model_path": 3}', "{}", "[]", "no JSON", ""])
def test_the_server_gets_the_body_of_a_good_folder_and_refuses_nonsense_itself(client: TestClient, body: str) -> None:
    assert client.post("/update_weights_from_disk", content=body).json() == {"took": body}


def test_other_routes_are_not_checked(client: TestClient) -> None:
    assert client.post("/other", json={"model_path": "/runs/v1"}).status_code == 200
