"""Runs one process of a run: starts it behind a guard, restarts it when it dies, and ends it with its children."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.environment import for_child
from agentrl.errors import AgentRLError, UserError
from agentrl.files import last_lines
from agentrl.processes import children, guard
from agentrl.processes.restarts import DEATHS_WINDOW_S, USER_ERROR_STATUS, Backoff, gave_up


class PartFailed(AgentRLError):
    """A process of the run died too often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """How to start a process. The part is finished when its process exits with status 0 and `done()` is true.

    The process inherits this process's environment without the secrets; `env` adds the secrets that it needs.
    """

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    log_file: Path
    done: Callable[[], bool] = lambda: False
    grace_s: float = guard.GRACE_S  # from SIGTERM to SIGKILL


async def _ignore(_: int) -> None:
    """The default callback: does nothing."""


async def _at_once() -> None:
    """The default wait before a start: none."""


async def keep_running(
    part: Part,
    *,
    max_restarts: int,
    before_start: Callable[[], Awaitable[None]] = _at_once,
    on_start: Callable[[int], Awaitable[None]] = _ignore,
    on_death: Callable[[int], Awaitable[None]] = _ignore,
) -> None:
    """Run `part` until it is finished, restarting it when it dies. On cancellation, end it and its children.

    `before_start` returns when the process may start. `on_start` receives the guard's process id; `on_death` receives
    the exit status, before the restart. Quick successive deaths delay the restart. Raises PartFailed after more than
    `max_restarts` deaths in DEATHS_WINDOW_S, and UserError on exit status USER_ERROR_STATUS.
    """
    deaths: deque[float] = deque(maxlen=max_restarts + 1)
    backoff = Backoff()
    while True:
        await before_start()
        log_start = part.log_file.stat().st_size if part.log_file.exists() else 0
        started = time.monotonic()
        status = await _run_once(part, on_start)
        if status == 0 and await asyncio.to_thread(part.done):
            return
        (last_line,) = last_lines(part.log_file, 1, log_start) or ["no output"]
        if status == USER_ERROR_STATUS:
            raise UserError(last_line.removeprefix("agentrl: "))
        deaths.append(time.monotonic())
        if len(deaths) > max_restarts and deaths[-1] - deaths[0] < DEATHS_WINDOW_S:
            raise PartFailed(gave_up(part.name, len(deaths), status, last_line, part.log_file))
        await on_death(status)
        await asyncio.sleep(backoff.after(deaths[-1] - started))


async def _run_once(part: Part, on_start: Callable[[int], Awaitable[None]]) -> int:
    part.log_file.parent.mkdir(parents=True, exist_ok=True)
    with part.log_file.open("ab") as log:
        env = for_child(os.environ) | part.env
        process = await children.start(part.argv, env=env, stdout=log, stderr=log)
    try:
        await on_start(process.pid)
        return await process.wait()
    finally:
        if process.returncode is None:
            await asyncio.shield(children.stop(process, part.grace_s))
