"""One process of a run: started behind a guard, restarted when it dies, ended with everything that it started.

The guard (agentrl/engine/guard.py) holds the other end of a pipe: it ends the process when we close the pipe, and also
when we die without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.engine import guard
from agentrl.errors import AgentRLError, UserError

MAX_RESTARTS, RESTART_WINDOW_S = 5, 600.0
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.5, 10.0
USER_ERROR_STATUS = 2
STOP_TIMEOUT_S = guard.GRACE_S + 10


class PartFailed(AgentRLError):
    """A part of the run died too often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How to start a process. It is done when it exits with status 0 and `done()` agrees; a service never is."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    log_file: Path
    done: Callable[[], bool] = lambda: False


async def keep_running(
    part: Part,
    *,
    on_start: Callable[[int], None] = lambda pid: None,
    on_death: Callable[[int], None] = lambda status: None,
) -> None:
    """Run `part` until it is done, restarting it when it dies. Cancelled: end it and leave nothing behind.

    `on_start` gets the guard's process id; `on_death` the exit status, before the restart. Raises PartFailed when it
    dies more than MAX_RESTARTS times in RESTART_WINDOW_S, UserError at once when it ends as a wrong setting does.
    """
    deaths: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
    while True:
        log_start = part.log_file.stat().st_size if part.log_file.exists() else 0
        status = await _run_once(part, on_start)
        if status == 0 and await asyncio.to_thread(part.done):
            return
        if status == USER_ERROR_STATUS:
            raise UserError(_last_line(part, log_start).removeprefix("agentrl: "))
        deaths.append(time.monotonic())
        if len(deaths) > MAX_RESTARTS and deaths[-1] - deaths[0] < RESTART_WINDOW_S:
            raise PartFailed(
                f"{part.name} died {len(deaths)} times, last with status {status}: {_last_line(part, log_start)} "
                f"(see {part.log_file})"
            )
        on_death(status)
        await asyncio.sleep(min(BACKOFF_FIRST_S * 2 ** (len(deaths) - 1), BACKOFF_MAX_S))


async def _run_once(part: Part, on_start: Callable[[int], None]) -> int:
    part.log_file.parent.mkdir(parents=True, exist_ok=True)
    with part.log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__, *part.argv),
            env=os.environ | part.env,
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    on_start(process.pid)
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(_stop(process))


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()  # what the guard waits for
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        kill_tree(process.pid)
        await process.wait()


def kill_tree(pid: int) -> None:
    """SIGKILL a process that we started, with all its descendants."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _last_line(part: Part, start: int) -> str:
    """The last line that this attempt wrote."""
    with part.log_file.open("rb") as log:
        log.seek(start)
        lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it wrote nothing"
