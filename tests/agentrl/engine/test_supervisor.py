"""Real processes: the guard, and a stand-in for SGLang that serves the fake engine's API."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentrl.engine import server_process
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, free_port
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.engine.supervisor import MAX_QUICK_DEATHS, EngineSupervisor, Weights
from agentrl.errors import EngineUnavailable, ModelFolderError, UserError

STAND_IN = "import sys, threading; from agentrl.testing import FakeEngine; FakeEngine(port=int(sys.argv[1])).start(); "
SERVE = STAND_IN + "threading.Event().wait()"


class Recorder:
    """Remembers what an observer hears; `served` is set at each start."""

    def __init__(self) -> None:
        self.served: asyncio.Queue[Server] = asyncio.Queue()
        self.deaths: list[str] = []

    def starting(self, elapsed_s: float, log_line: str) -> None: ...

    def serving(self, server: Server, start_s: float) -> None:
        self.served.put_nowait(server)

    def died(self, reason: str, restart_in_s: float) -> None:
        self.deaths.append(reason)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    return EngineSpec(model=model, port=free_port(), log_file=tmp_path / "engine.log")


def start_by(monkeypatch: pytest.MonkeyPatch, argv: Callable[[EngineSpec], list[str]]) -> None:
    """Start another program in the place of SGLang."""
    monkeypatch.setitem(BACKENDS, "sglang", replace(BACKENDS["sglang"], argv=argv))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    start_by(monkeypatch, lambda spec: [sys.executable, "-c", SERVE, str(spec.port)])


FOLLOWER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""
"""As SGLang on a host other than the first: it serves nothing but `/health`, once its ranks have loaded the model."""


async def test_a_server_on_a_host_other_than_the_first_serves_only_its_health(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_by(monkeypatch, lambda spec: [sys.executable, "-c", FOLLOWER, str(spec.port)])
    news = Recorder()
    place = {"tensor": 2, "hosts": 2, "host_rank": 1, "leader": "127.0.0.1:1"}
    async with running(EngineSupervisor(replace(spec, **place), news, restarts=False)) as task:
        server = asyncio.ensure_future(news.served.get())
        await asyncio.wait({server, task}, return_when=asyncio.FIRST_COMPLETED)
        assert server.done(), task.exception()


@asynccontextmanager
async def running(supervisor: EngineSupervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.ensure_future(supervisor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


@pytest.mark.usefixtures("stand_in")
async def test_a_server_that_dies_is_restarted_and_none_is_left_behind(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.processes.restarts.BACKOFF_FIRST_S", 0.0)
    news = Recorder()
    async with running(EngineSupervisor(spec, news)):
        first = await news.served.get()
        _guard, _keeper, server = family(first.pid)
        server.send_signal(signal.SIGKILL)
        second = await news.served.get()
        assert news.deaths == [f"the engine ended with status {128 + signal.SIGKILL}"]
        processes = family(second.pid)
        assert len(processes) == 3
    assert psutil.wait_procs(processes, timeout=120)[1] == []


@pytest.mark.usefixtures("stand_in")
async def test_weights_are_loaded_before_it_counts_as_serving(spec: EngineSpec) -> None:
    import aiohttp

    news = Recorder()
    async with running(EngineSupervisor(spec, news, weights=Weights(path=spec.model, version=4))):
        served = await news.served.get()
        async with aiohttp.ClientSession() as http:
            assert (await SGLangClient(served.url, http).model_info()).weight_version == 4


async def test_the_supervisor_gives_up_after_quick_deaths_and_shows_the_log(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.processes.restarts.BACKOFF_FIRST_S", 0.0)
    start_by(monkeypatch, lambda spec: [sys.executable, "-c", "raise SystemExit('no such kernel')"])
    news = Recorder()
    with pytest.raises(EngineUnavailable, match="no such kernel"):
        await EngineSupervisor(spec, news).run()
    assert len(news.deaths) == MAX_QUICK_DEATHS - 1


async def test_a_server_that_is_not_healthy_in_time_is_stopped(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_by(monkeypatch, lambda spec: [sys.executable, "-c", "import time; time.sleep(600)"])
    late = server_process.launch(spec)
    with pytest.raises(EngineUnavailable, match="not healthy after"):
        await late.wait_healthy(timeout_s=0.1)
    late.stop()
    assert late.returncode is not None


def test_launch_refuses_a_port_in_use_and_a_model_that_is_not_there(spec: EngineSpec, tmp_path: Path) -> None:
    import dataclasses
    import socket

    with socket.create_server(("127.0.0.1", spec.port)), pytest.raises(UserError, match=f"cannot listen.*{spec.port}"):
        server_process.launch(spec)
    with pytest.raises(ModelFolderError, match="does not exist"):
        server_process.launch(dataclasses.replace(spec, model=tmp_path / "absent"))
