"""Runs `agentrl train` as a child process: configures it, finds its parts, kills them, and ends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from agentrl.processes import guard

NAME = "crash"
SUPERVISOR = "supervisor"
POLL_S = 0.03
MAX_RESTARTS = 15
"""`max_restarts` of the run: more than our kills of one part in ten minutes, but few enough to end a part that keeps
dying.
"""
STUCK_S = 300.0
STOP_TIMEOUT_S = 60.0


class RunFailed(Exception):
    """The run ended too early, or makes no progress."""


class Position(NamedTuple):
    """The position of a run: its last published step, and the state of the newest optimizer step."""

    step: int
    state: str


@dataclass
class Run:
    """One run in a folder of its own. With `engine_url` it uses that server and starts none.

    `command` is agentrl, and `changes` replace keys of the configuration.
    """

    folder: Path
    database_url: str
    seed: int
    steps: int
    engine_url: str | None = None
    think_s: float = 0.2
    command: tuple[str, ...] = (sys.executable, "-m", "agentrl")
    changes: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        shutil.copyfile(Path(__file__).with_name("agent.py"), self.folder / "ledger_agent.py")
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self._config() | self.changes))
        self.database: Engine = create_engine(read_only(self.database_url), poolclass=NullPool)

    def _config(self) -> dict[str, Any]:
        return {
            "name": NAME,
            "model": "tiny",
            "agent": "ledger_agent:LedgerAgent",
            "agent_args": {"ledger": str(self.ledger), "think_s": self.think_s},
            "tasks": "agentrl.agents.reverse:train_tasks",
            "seed": self.seed,
            "max_restarts": MAX_RESTARTS,
            "engine": {"urls": [self.engine_url] if self.engine_url else []},
            "proxy": {"session_timeout_s": 60},
            "rollout": {"group_size": 4, "max_concurrent_groups": 8},
            # Every second seed writes a checkpoint every second step, so a killed trainer loses a published step.
            "trainer": {
                "groups_per_step": 4,
                "max_staleness": 2,
                "lr": 4e-4,
                "threads": 1,
                "checkpoint_every": 1 + self.seed % 2,
            },
        }

    @property
    def ledger(self) -> Path:
        """The agent's ledger."""
        return self.folder / "ledger.jsonl"

    @property
    def log(self) -> Path:
        """Output of `agentrl train`."""
        return self.folder / "train.log"

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start or resume the run."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRL_")}
        if "AGENTRL_CACHE" in os.environ:
            env["AGENTRL_CACHE"] = os.environ["AGENTRL_CACHE"]
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "AGENTRL_DATABASE_URL": self.database_url}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.command, "train", "config.yaml", f"steps={self.steps}"],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def finished(self) -> bool:
        """Whether `agentrl train` has ended with status 0. Raises RunFailed for another status."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None and status != 0:
            raise RunFailed(f"agentrl train ended with status {status}: {self.last_line()}")
        return status == 0

    def stop(self) -> None:
        """End all processes of the run, in any state."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT_S)
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def leftovers(self) -> list[psutil.Process]:
        """Processes of the run that still exist, found by its working directory, which they inherit."""
        return [p for p in psutil.process_iter() if _cwd(p) == str(self.folder) and p.pid != os.getpid()]

    # -- parts -----------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, psutil.Process]:
        """Part → its guard process, for every part that runs now."""
        found = {}
        assert self.process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    argv = child.cmdline()
                    if guard.__file__ in argv:
                        found[argv[argv.index("agentrl") + 1] if "agentrl" in argv else "engine"] = child
        return found

    def kill(self, part: str) -> bool:
        """SIGKILL a part and everything below it; false when it does not run. A killed supervisor starts again."""
        if part == SUPERVISOR:
            assert self.process is not None
            if self.process.poll() is not None:
                return False
            self.process.kill()
            self.process.wait()
            self.start()
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            if (of_part := self.parts().get(part)) is not None:
                return _kill_all(of_part.children(recursive=True))
        return False

    # -- where it is -----------------------------------------------------------------------------------------------

    def position(self) -> Position:
        """The run's position in the database; step 0 while there is no database."""
        try:
            with self.database.connect() as conn:
                row = conn.execute(
                    text("SELECT id, published_step FROM runs WHERE name = :name"), {"name": NAME}
                ).first()
                if row is None:
                    return Position(0, "none")
                newest = text("SELECT state FROM steps WHERE run_id = :run ORDER BY id DESC LIMIT 1")
                return Position(row.published_step, conn.execute(newest, {"run": row.id}).scalar() or "none")
        except DBAPIError:
            return Position(0, "none")

    def follow(self) -> Iterator[Position]:
        """Yield the run's position repeatedly until it has finished. Raises RunFailed when it fails or gets stuck."""
        last, since = self.position(), time.monotonic()
        while not self.finished():
            now = self.position()
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                raise RunFailed(f"no progress for {STUCK_S:g} s at step {now.step} ({now.state}): {self.last_line()}")
            yield now
            time.sleep(POLL_S)

    def last_line(self) -> str:
        """The last line of the supervisor's log."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def read_only(database_url: str) -> str:
    """A read-only URL: opening a SQLite file that does not exist yet must not create it."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        return f"sqlite:///file:{url.database}?mode=ro&uri=true"
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def _kill_all(processes: list[psutil.Process]) -> bool:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(processes)


def _cwd(process: psutil.Process) -> str | None:
    try:
        return str(process.cwd())
    except psutil.Error:
        return None
