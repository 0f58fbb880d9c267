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

from agentrl.engine.folder_guard import ChecksFolders, Loads
from agentrl.errors import ModelFolderError


def check(folder: Path) -> None:
    if folder.name != "good":
        raise ModelFolderError(f"{folder} is of another model")


@pytest.fixture
def client() -> TestClient:
    async def took(request: Request) -> JSONResponse:
        return JSONResponse({"took": (await request.body()).decode()})

    routes = [Route(path, took, methods=["POST"]) for path in ("/load", "/other")]
    guard = Middleware(ChecksFolders, routes={"/load": Loads("path", check)})
    return TestClient(Starlette(routes=routes, middleware=[guard]))


def test_a_folder_that_does_not_fit_is_refused_with_the_reason(client: TestClient) -> None:
    answer = client.post("/load", json={"path": "/runs/v1", "name": "v1"})
    assert answer.status_code == 400
    assert answer.json() == {"success": False, "message": "/runs/v1 is of another model"}
    assert client.post("/load", content=b" " * (1 << 21)).status_code == 400


@pytest.mark.parametrize("body", ['{"path": "/runs/good"}', '{"path": 3}', "{}", "[]", "no JSON", ""])
def test_the_server_gets_the_body_of_a_good_folder_and_refuses_nonsense_itself(client: TestClient, body: str) -> None:
    assert client.post("/load", content=body).json() == {"took": body}


def test_other_routes_are_not_checked(client: TestClient) -> None:
    assert client.post("/other", json={"path": "/runs/v1"}).status_code == 200
