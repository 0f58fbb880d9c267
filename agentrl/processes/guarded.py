"""Child processes that never outlive us: guard.py ends them when we ask, and when we die without a word."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from agentrl.processes import guard

MARGIN_S = 10.0
"""For the guard itself to end."""


async def start(
    argv: Sequence[str], *, env: Mapping[str, str], stdout: int | IO[Any] | None, stderr: int | IO[Any] | None
) -> asyncio.subprocess.Process:
    """Start `argv` behind a guard; returns the guard, whose exit status is the command's (128 + N for signal N)."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", guard.__file__, *argv),
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


async def stop(process: asyncio.subprocess.Process, grace_s: float = guard.GRACE_S) -> None:
    """End what `start` started: SIGTERM, and after `grace_s` seconds SIGKILL, with everything that it started."""
    assert process.stdin is not None
    process.stdin.write(f"{grace_s}".encode())
    process.stdin.close()  # what the guard waits for
    try:
        await asyncio.wait_for(process.wait(), grace_s + MARGIN_S)
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
