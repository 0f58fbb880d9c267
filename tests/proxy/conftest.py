"""A real proxy process-in-a-thread: uvicorn on a socket, a database built by Alembic, a scriptable engine behind it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from databases import Databases
from run_records import create_run

from agentrl.engine.engine_keys import EngineKeys
from agentrl.engine.server_process import Server, free_port
from agentrl.proxy.app import Settings, create_app
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database, runs
from agentrl.testing import FakeEngine

ADMIN = {"Authorization": "Bearer admin-key"}
RUN = {"Authorization": "Bearer run-key"}
CONFIG = {
    "name": "test",
    "model": "tiny",
    "agent": "a:B",
    "tasks": "t.jsonl",
    "steps": 10,
    "rollout": {"group_size": 2},
    "trainer": {"groups_per_step": 2},
}
MANY_SESSIONS = {"rollout": {"max_concurrent_groups": 10_000}, "trainer": {"groups_per_step": 10_000}}
"""Admission never refuses a session."""


@dataclass
class Proxy:
    """A running proxy and what stands around it."""

    url: str
    store_url: str
    database: Database
    run_id: str
    engine: Any  # a FakeEngine, but for `real_proxy`
    renderer: Renderer
    http: httpx.Client
    sdks: ExitStack  # the clients of `sdk`, closed with the proxy

    def post(self, path: str, body: Any = None, *, headers: dict[str, str] = RUN) -> httpx.Response:
        return self.http.post(self.url + path, json=body if body is not None else {}, headers=headers)

    def get(self, path: str, *, headers: dict[str, str] = RUN) -> Any:
        answer = self.http.get(self.url + path, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def session(self, **evaluation: Any) -> dict[str, Any]:
        """A new session: of a training group, or of an evaluation with `sampling=…`."""
        body = {"is_eval": True, "task": {}, **evaluation} if evaluation else {}
        answer = self.post("/groups", body)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()["sessions"][0]
        return opened

    def sdk(self, session: dict[str, Any], **options: Any) -> openai.OpenAI:
        made = openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0, **options)
        return self.sdks.enter_context(made)

    def says(self, text: str, *, end: bool = True) -> list[int]:
        """Token ids of an answer with this text."""
        empty = self.renderer.render([{"role": "user", "content": ""}], None)
        full = self.renderer.render([{"role": "user", "content": text}], None)
        head = next(i for i, (a, b) in enumerate(zip(empty, full, strict=False)) if a != b) if text else 0
        ids = full[head : head + len(full) - len(empty)]
        return ids + self.renderer.stop_token_ids[:1] * end

    def metrics_text(self) -> str:
        """What a scrape shows, with whole numbers written as such."""
        answer = self.http.get(self.url + "/metrics", headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.text.replace(".0\n", "\n")

    def calls(self, session: dict[str, Any]) -> list[dict[str, Any]]:
        return self.get(f"/sessions/{session['session_id']}/trace")["calls"]


@contextmanager
def serve_proxy(
    database_url: str, engine_urls: list[str], port: int, replica: str = "test-replica", key: str | None = None
) -> Iterator[uvicorn.Server]:
    """Run a proxy until the block ends."""
    settings = Settings(
        database_url=database_url,
        run_name="test",
        engine_urls=engine_urls,
        engine_keys=EngineKeys(key),
        admin_key="admin-key",
        replica=replica,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started, "the proxy did not start"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(120)


def wait_until(condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """Wait for a condition; returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
    return value


@pytest.fixture
def database_kind() -> str:
    """SQLite; what leans on the database runs on both: `pytest.mark.parametrize("database_kind", KINDS)`."""
    return "sqlite"


@pytest.fixture
def run_config() -> dict[str, Any]:
    """The run's configuration; a module that needs another one overrides this."""
    return deepcopy(CONFIG)


@pytest.fixture
def store_url(databases: Databases, database_kind: str, run_config: dict[str, Any], tiny_model: Path) -> Iterator[str]:
    """A database that holds one run."""
    with databases.lent(database_kind) as url:
        add_run(url, run_config, tiny_model)
        yield url


def add_run(url: str, config: dict[str, Any], model: Path) -> None:
    """Create the run `test` with four tasks."""
    database = Database(url)
    with database.write() as conn:
        create_run(conn, config=config, task_data=[{"n": i} for i in range(4)], base_model=model, steps=10)
    database.close()


@cache
def renderer_of(model: Path) -> Renderer:
    """The renderer that tests say things with; each proxy loads its own."""
    return load_renderer(model)


@contextmanager
def started(store_url: str, engine: FakeEngine | Server, model: Path) -> Iterator[Proxy]:
    """A proxy over a store and an engine, with its clients."""
    port = free_port()
    database = Database(store_url)
    with database.read() as conn:
        run_id = runs.by_name(conn, "test").id
    with serve_proxy(store_url, [engine.url], port), httpx.Client(timeout=120) as http, ExitStack() as sdks:
        url = f"http://127.0.0.1:{port}"
        yield Proxy(url, store_url, database, run_id, engine, renderer_of(model), http, sdks)
    database.close()


@pytest.fixture
def own_proxy(store_url: str, fake_engine: FakeEngine, tiny_model: Path) -> Iterator[Proxy]:
    """A new proxy with a store and an engine of its own."""
    with started(store_url, fake_engine, tiny_model) as made:
        yield made


@pytest.fixture
def proxy(store_url: str, fake_engine: FakeEngine, tiny_model: Path) -> Iterator[Proxy]:
    """The proxy of a test; a module whose tests use sessions of their own overrides this with `shared_proxy`."""
    with started(store_url, fake_engine, tiny_model) as made:
        yield made


@pytest.fixture
def real_proxy(store_url: str, sglang_engine: Server, tiny_model: Path) -> Iterator[Proxy]:
    """A proxy in front of real SGLang; its tests are marked `engine`."""
    with started(store_url, sglang_engine, tiny_model) as made:
        yield made


@pytest.fixture(scope="module")
def module_proxies(databases: Databases) -> Iterator[Callable[[str, dict[str, Any], Path], Proxy]]:
    """Starts a proxy per kind of database, configuration and model, once per module."""
    made: dict[str, Proxy] = {}
    with ExitStack() as stack:

        def proxy_of(kind: str, config: dict[str, Any], model: Path) -> Proxy:
            asked = json.dumps([kind, config, str(model)])
            if asked not in made:
                url = stack.enter_context(databases.lent(kind))
                add_run(url, config, model)
                made[asked] = stack.enter_context(started(url, stack.enter_context(FakeEngine()), model))
            return made[asked]

        yield proxy_of


@pytest.fixture
def shared_proxy(
    module_proxies: Callable[[str, dict[str, Any], Path], Proxy],
    database_kind: str,
    run_config: dict[str, Any],
    tiny_model: Path,
) -> Iterator[Proxy]:
    """One proxy for all tests of a module that look at nothing but their own sessions and requests.

    A start takes 0.1 s of CPU. Tests that damage the engine or look at the whole run use `own_proxy`.
    """
    many = {part: run_config.get(part, {}) | more for part, more in MANY_SESSIONS.items()}
    shared = module_proxies(database_kind, run_config | many, tiny_model)
    wait_until(lambda: not shared.engine.running)
    shared.engine.clear()
    with ExitStack() as sdks:
        yield replace(shared, sdks=sdks)


@pytest.fixture
def second(proxy: Proxy) -> Iterator[Proxy]:
    """Another replica of the same run."""
    port = free_port()
    with serve_proxy(proxy.store_url, [proxy.engine.url], port, replica="second-replica"):
        yield replace(proxy, url=f"http://127.0.0.1:{port}")


@pytest.fixture
def serve() -> Callable[..., Any]:
    """Start further proxies: `with serve(store_url, engine_urls, port): …`."""
    return serve_proxy


@pytest.fixture
def start() -> Callable[..., Any]:
    """Start a proxy and its clients: `with start(store_url, engine, model) as proxy: …`."""
    return started


@pytest.fixture
def until() -> Callable[..., Any]:
    """Wait for a condition."""
    return wait_until
