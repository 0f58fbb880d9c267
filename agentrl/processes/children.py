"""Starts child processes behind a guard (guard.py), which ends them when we ask for it and when we die."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from agentrl.processes import guard

MARGIN_S = 10.0
"""How long the guard itself may take to end, beyond the grace period of the command."""


async def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | IO[Any] | None,
    stderr: int | IO[Any] | None,
    pass_fds: Sequence[int] = (),
    io: int | None = None,
    nice: bool = False,
    cwd: str | None = None,
) -> asyncio.subprocess.Process:
    """Start `argv` behind a guard. Returns the guard; its exit status is the command's (128 + N after signal N). The
    command inherits the open files `pass_fds`. The open socket `io` is its stdin and stdout. Foreign code is `nice`: it
    leaves the processor to heartbeats, proxies and engines.
    """
    return await asyncio.create_subprocess_exec(
        *_guarded(argv, pass_fds, io, nice=nice),
        pass_fds=pass_fds if io is None else [*pass_fds, io],
        env=env,
        cwd=cwd,
        stdin=asyncio.subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def start_blocking(
    argv: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | None, nice: bool = False
) -> subprocess.Popen[bytes]:
    """`start` without an event loop; stdout and stderr go to `output`, or where this process's go."""
    return subprocess.Popen(
        _guarded(argv, nice=nice),
        env=env,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        start_new_session=True,
    )


async def stop(process: asyncio.subprocess.Process, grace_s: float = guard.GRACE_S) -> None:
    """Send SIGTERM to a command that `start` started; after `grace_s` seconds SIGKILL, to all that it started too."""
    assert process.stdin is not None
    process.stdin.write(f"{grace_s}".encode())
    process.stdin.close()  # the guard waits for this
    try:
        await asyncio.wait_for(process.wait(), grace_s + MARGIN_S)
    except TimeoutError:
        kill_tree(process.pid)
        await process.wait()


def stop_blocking(process: subprocess.Popen[bytes], grace_s: float = guard.GRACE_S) -> None:
    """`stop` for a command that `start_blocking` started."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(f"{grace_s}".encode())
        process.stdin.close()
    process.wait(grace_s + MARGIN_S)


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process that we started, and to all its descendants."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [*root.children(recursive=True), root]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _guarded(argv: Sequence[str], fds: Sequence[int] = (), io: int | None = None, *, nice: bool = False) -> list[str]:
    options = [*(f"--fd={fd}" for fd in fds), *([f"--io={io}"] if io is not None else []), *["--nice"] * nice]
    return [sys.executable, "-I", "-S", guard.__file__, *options, *argv]
