"""Where coding agents work: a folder with the job's file, an empty home, a proxy, and what they leave behind."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import apprentice
import httpx
import uvicorn
from run_records import create_run

from agentrl.diagnosis import report, sources
from agentrl.diagnosis.report import Report
from agentrl.domain.schemas import Json
from agentrl.engine.server_process import free_port
from agentrl.proxy.app import Settings, create_app
from agentrl.rendering import Renderer, load_renderer
from agentrl.store import Database

NAME = "coders"
RUN_KEY = {"Authorization": "Bearer run-key"}
PATIENCE_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What became of one command."""

    status: int
    said: str
    error: str
    session_id: str
    report: Report


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A proxy that serves one run, and a folder to work in."""

    url: str
    database: Database
    renderer: Renderer
    folder: Path = Path()
    home: Path = Path()

    def work(self, command: Sequence[str | Path], env: Mapping[str, str]) -> Work:
        """Run a command in a session of its own; `{url}` and `{key}` in `env` are the session's."""
        opened = self.post("/sessions", {})
        root = opened["base_url"].removesuffix("/v1")
        here = {"PATH": os.environ["PATH"], "HOME": str(self.home)}
        own = {name: value.format(url=root, key=opened["api_key"]) for name, value in env.items()}
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=here | own,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        session_id = opened["session_id"]
        self.post(f"/sessions/{session_id}/reward", {"value": 1.0})
        self.post(f"/sessions/{session_id}/end", {})
        session, _ = sources.from_store(self.database, session_id)
        return Work(
            status=done.returncode,
            said=done.stdout,
            error=done.stderr,
            session_id=session_id,
            report=report.make(session, self.renderer.decode, done.returncode),
        )

    def post(self, path: str, body: Json) -> Json:
        answer = httpx.post(self.url + path, json=body, headers=RUN_KEY, timeout=120)
        assert answer.is_success, answer.text
        found: Json = answer.json()
        return found


def furnished(desk: Desk, folder: Path) -> Desk:
    """The desk with an empty home, and the job's file in a folder of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(apprentice.SECRET + "\n")
    return replace(desk, folder=work, home=home)


@contextmanager
def at_work(database_url: str, model: Path, engine_url: str, rollout: Json | None = None) -> Iterator[Desk]:
    """A run on `model`, which the engine serves as version 0, and its proxy until the block ends."""
    config = {
        "name": NAME,
        "model": str(model),
        "agent": "none:None",
        "tasks": "none.jsonl",
        "steps": 1,
        "rollout": {"group_size": 1, "min_group_size": 1, "max_concurrent_groups": 64, **(rollout or {})},
        "trainer": {"groups_per_step": 4096},
    }
    database = Database(database_url)
    with database.write() as conn:
        create_run(conn, name=NAME, config=config, base_model=model)
    port = free_port()
    proxy = Settings(
        database_url=database_url, run_name=NAME, engine_urls=[engine_url], admin_key="admin-key", replica="r"
    )
    options: Any = {"port": port, "log_level": "warning", "timeout_graceful_shutdown": 2}
    server = uvicorn.Server(uvicorn.Config(create_app(proxy), **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the proxy did not start"
        thread.join(0.02)
    try:
        yield Desk(url=f"http://127.0.0.1:{port}", database=database, renderer=load_renderer(model))
    finally:
        server.should_exit = True
        thread.join(120)
        database.close()
