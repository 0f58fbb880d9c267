"""Where agent programs play: one of the session's real servers behind a real proxy, and a tap between the two."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from run_records import create_run
from sqlalchemy import select

from agentrl.domain.schemas import Json, TrajectoryTokens
from agentrl.engine.backends import BACKENDS
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.engine_keys import EngineKeys
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import free_port
from agentrl.proxy.app import Settings, create_app
from agentrl.store import Database
from agentrl.store.tables import trajectories as trajectory_rows
from agentrl.store.training import trajectories

PROGRAMS = Path(__file__).parent / "programs"
RUN_KEY = {"Authorization": "Bearer run-key"}
PATIENCE_S = 90.0


@dataclass
class Exchange:
    """What the engine was given and what it answered."""

    input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@contextmanager
def tapped(kind: Any) -> Iterator[dict[str, list[Exchange]]]:
    """Everything that engines are asked to generate by clients of this class, by the session that asks."""
    heard: dict[str, list[Exchange]] = {}
    generate = kind.generate

    async def listen(self: EngineClient, **request: Any) -> AsyncGenerator[Chunk, None]:
        exchange = Exchange(list(request["input_ids"]))
        heard.setdefault(request["routing_key"], []).append(exchange)
        async with aclosing(generate(self, **request)) as chunks:
            async for chunk in chunks:
                exchange.output_ids += chunk.output_ids
                exchange.logprobs += chunk.logprobs
                yield chunk

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "generate", listen)
        yield heard


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One run of a program in a session of its own, after the session's end."""

    program: str
    answers: list[str]  # none when the program failed
    pieces: int
    error: str
    calls: list[Json]
    forks: list[str]
    status: str
    engine: list[Exchange]
    trajectories: list[TrajectoryTokens]
    states: list[str]


@dataclass(frozen=True, kw_only=True)
class Arena:
    """A proxy that serves one run, with the rows and the tap that tests look at."""

    url: str
    database: Database
    run_id: str
    heard: dict[str, list[Exchange]]
    python: Path

    def play(self, program: str, stream: bool) -> Episode:
        """Open a session, run `NAME VARIANT`, reward and end the session, read everything about it."""
        opened = self.post("/sessions", {"metadata": {"program": program}})
        root = f"/sessions/{opened['session_id']}"
        done = run_program(self.python, program, stream, base_url=opened["base_url"], api_key=opened["api_key"])
        said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"answers": [], "pieces": 0}
        self.post(f"{root}/reward", {"value": float(bool(said["answers"]))})
        self.post(f"{root}/end", {})
        session = httpx.get(f"{self.url}{root}/trace", headers=RUN_KEY, timeout=120).raise_for_status().json()
        rows = trajectory_rows.c
        with self.database.read() as conn:
            built = conn.execute(
                select(rows.id, rows.state).where(rows.session_id == opened["session_id"]).order_by(rows.created_at)
            ).all()
            loaded = trajectories.load(conn, [row.id for row in built], ages={0: 0}, discount=1.0) if built else None
        return Episode(
            program=program,
            answers=said["answers"],
            pieces=said["pieces"],
            error=done.stderr[-3000:],
            calls=session["calls"],
            forks=session["forks"],
            status=session["status"],
            engine=self.heard.get(opened["session_id"], []),
            trajectories=loaded.trajectories if loaded else [],
            states=[row.state for row in built],
        )

    def calls(self, session_id: str) -> list[Json]:
        """What is recorded of a session."""
        answer = httpx.get(f"{self.url}/sessions/{session_id}/trace", headers=RUN_KEY, timeout=120)
        recorded: list[Json] = answer.raise_for_status().json()["calls"]
        return recorded

    def post(self, path: str, body: Json) -> Json:
        answer = httpx.post(self.url + path, json=body, headers=RUN_KEY, timeout=120).raise_for_status()
        opened: Json = answer.json()
        return opened


def run_program(
    python: Path, program: str, stream: bool, *, base_url: str, api_key: str
) -> subprocess.CompletedProcess[str]:
    """A program, pointed at one session as a user would point it."""
    name, variant = program.split()
    env = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "TMPDIR")} | {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    command = [str(python), str(PROGRAMS / f"{name}.py"), variant, "--stream" if stream else "--no-stream"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def serve(database_url: str, model: Path, engine: EngineSpec, python: Path) -> Iterator[Arena]:
    """A run on `model`, which the engine already serves as version 0, and its proxy until the block ends."""
    config = {
        "name": "frameworks",
        "model": str(model),
        "agent": "none:None",
        "tasks": "none.jsonl",
        "steps": 1,
        "engine": {"backend": engine.backend},
        "rollout": {"group_size": 1, "min_group_size": 1, "max_concurrent_groups": 64},
        "trainer": {"groups_per_step": 4096},
    }
    database = Database(database_url)
    with database.write() as conn:
        run_id = create_run(conn, name="frameworks", config=config, base_model=model)
    port = free_port()
    settings = Settings(
        database_url=database_url,
        run_name="frameworks",
        engine_urls=[engine.url],
        engine_keys=EngineKeys(engine.key),
        admin_key="admin-key",
        replica="r",
    )
    options: Any = {"port": port, "log_level": "warning", "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(create_app(settings), **options))
    thread = threading.Thread(target=server.run, daemon=True)
    with tapped(BACKENDS[engine.backend].client) as heard:
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the proxy did not start"
            thread.join(0.02)
        try:
            url = f"http://127.0.0.1:{port}"
            yield Arena(url=url, database=database, run_id=run_id, heard=heard, python=python)
        finally:
            server.should_exit = True
            thread.join(120)
            database.close()
