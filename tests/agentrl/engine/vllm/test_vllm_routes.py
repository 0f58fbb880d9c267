"""The routes of ours in vLLM's server: the order of a load, and what each failure leaves behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from agentrl.domain.schemas import Json
from agentrl.engine.vllm.keyed_vllm import guard, know_pauses


class Core:
    """What our routes use of vLLM's engine. `calls` are in order."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.problem: str | None = None
        self.failure: str | None = None
        self.label, self.clears = "0", True

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("clear")
        return self.clears

    async def get_weight_version(self) -> str:
        return self.label

    async def update_weight_version(self, label: str) -> None:
        self.calls.append(f"label {label}")
        self.label = label

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [{"agentrl_problem": self.problem, "agentrl_load": self.failure}.get(method, {"a": "1"})]


know_pauses(Core)
LOADED = ["agentrl_problem", "clear", "label undefined", "agentrl_load", "label 4"]
BODY: Json = {"model_path": "/weights", "weight_version": "4", "flush_cache": True}


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
async def http(core: Core) -> AsyncIterator[httpx.AsyncClient]:
    app = Starlette(middleware=[Middleware(CORSMiddleware, allow_origins=["*"])])
    app.middleware_stack = app.build_middleware_stack()  # as vLLM does
    app.state.engine_client = core
    guard(app, "the-key", {"capabilities": ["pauses"]})
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": "Bearer the-key"}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", headers=headers) as client:
        yield client


async def test_all_routes_but_the_health_checks_need_the_key_and_no_web_page_may_call(http: httpx.AsyncClient) -> None:
    bare = {"Authorization": "", "Origin": "http://page"}
    for path in ("/agentrl/server", "/agentrl/digests", "/pause", "/metrics", "/v1/models"):
        assert (await http.get(path, headers=bare)).status_code == 401, path
    ready = await http.get("/ready", headers=bare)
    assert ready.json() == {"is_paused": False}
    assert "access-control-allow-origin" not in ready.headers
    assert (await http.get("/agentrl/server")).json() == {"capabilities": ["pauses"]}
    assert (await http.get("/agentrl/digests")).json() == {"ranks": [{"a": "1"}]}


async def test_a_load_pauses_a_serving_engine_and_lets_it_go_on(http: httpx.AsyncClient, core: Core) -> None:
    assert (await http.post("/update_weights_from_disk", json=BODY)).json() == {"success": True}
    assert core.calls == ["pause keep", *LOADED, "resume"]


async def test_a_paused_engine_stays_paused(http: httpx.AsyncClient, core: Core) -> None:
    await core.pause_generation(mode="keep", clear_cache=False)
    assert (await http.get("/ready")).json() == {"is_paused": True}
    body = BODY | {"weight_version": None, "flush_cache": False}
    await http.post("/update_weights_from_disk", json=body)
    assert core.calls == ["pause keep", "agentrl_problem", "label undefined", "agentrl_load", "label 0"]
    assert (await http.get("/ready")).json() == {"is_paused": True}


@pytest.mark.parametrize("what", ["problem", "cache"])
async def test_a_refused_load_changes_nothing(http: httpx.AsyncClient, core: Core, what: str) -> None:
    core.problem, core.clears = ("k has another shape", True) if what == "problem" else (None, False)
    answer = await http.post("/update_weights_from_disk", json=BODY)
    assert answer.status_code == 400
    assert ("another shape" if what == "problem" else "requests use it") in answer.json()["message"]
    assert core.label == "0"
    assert "agentrl_load" not in core.calls
    assert core.calls[-1] == "resume"


async def test_a_load_that_fails_in_the_middle_leaves_the_engine_paused_without_a_version(
    http: httpx.AsyncClient, core: Core
) -> None:
    core.failure = "q is not in the model after the load"
    answer = await http.post("/update_weights_from_disk", json=BODY)
    assert (answer.status_code, core.label) == (400, "undefined")
    assert (await http.get("/ready")).json() == {"is_paused": True}


async def test_a_dead_core_is_not_ready(http: httpx.AsyncClient, core: Core) -> None:
    core.errored = True
    assert (await http.get("/ready")).status_code == 503
