"""Runs one command in a sandbox, with bounded time, memory, processes, files and output."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.processes import children
from agentrl.sandbox.isolation import BASE_PYTHON, ENVIRONMENT, Isolation, choose, confined
from agentrl.sandbox.sandbox_files import open_files

READ_BYTES = 65_536
STDIN = ".stdin"
"""File of the sandbox with the command's stdin."""
Ended = Literal["exit", "time", "output"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a command."""

    time_s: float = 10.0
    """Wall time. Each process may also compute for this long."""
    memory_mb: int = 1024
    """Address space of each process."""
    processes: int = 64
    """Processes and threads."""
    disk_mb: int = 64
    """All of its files; they are kept in memory."""
    output_bytes: int = 65_536
    """Bytes of stdout, and of stderr. A command that writes more is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a command ended."""

    ended: Ended
    """By itself, or because its time was over, or because it wrote too much."""
    status: int | None
    """The exit status, 128 + N after signal N; None if it was ended."""
    stdout: str
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether the command ended by itself with status 0."""
        return self.status == 0


async def run(
    command: Sequence[str],
    *,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    limits: Limits = Limits(),
    isolation: Isolation | None = None,
    readable: Sequence[str] = (),
) -> Result:
    """Run a command in an empty folder that has `files` (relative path → content).

    It sees the system's programs and libraries, and `readable` folders. Raises UserError when this machine cannot
    isolate it, or a file's path leads out of its folder.
    """
    chosen = await asyncio.to_thread(choose, isolation)
    given = {**(files or {}), **({STDIN: stdin} if stdin else {})}
    words = ["sh", "-c", f'exec "$@" < {STDIN}', "sh", *command] if stdin else list(command)
    with open_files(given) as (opened, path):
        argv = confined(
            chosen,
            words,
            _prlimit(limits),
            files=path,
            disk_bytes=limits.disk_mb * 2**20,
            readable=readable,
        )
        return await _bounded(argv, limits, opened)


async def run_python(source: str, *, python: str = BASE_PYTHON, **options: Any) -> Result:
    """Run Python source as `main.py`, with the standard library. `options` are those of `run`.

    For another interpreter and its packages, give `python` and its folder in `readable`.
    """
    files = {**options.pop("files", {}), "main.py": source}
    return await run([python, "-sB", "main.py"], files=files, **options)


def _prlimit(limits: Limits) -> list[str]:
    return [
        f"--as={limits.memory_mb * 2**20}",
        f"--cpu={math.ceil(limits.time_s)}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.disk_mb * 2**20}",
        "--nofile=256",
        "--core=0",
    ]


class _TooLong(Exception):
    """A command wrote more than it may."""


async def _bounded(argv: Sequence[str], limits: Limits, files: int) -> Result:
    """Run a program behind a guard, until it ends, its time is over or it has written too much."""
    began = time.monotonic()
    pipe = asyncio.subprocess.PIPE
    process = await children.start(argv, env=ENVIRONMENT, stdout=pipe, stderr=pipe, pass_fds=[files], nice=True)
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = bytearray(), bytearray()
    ended: Ended = "exit"
    try:
        async with asyncio.timeout(limits.time_s):
            await asyncio.gather(_read(process.stdout, output, limits), _read(process.stderr, errors, limits))
            await process.wait()
    except TimeoutError:
        ended = "time"
    except _TooLong:
        ended = "output"
    finally:
        if process.returncode is None:
            await asyncio.shield(_end(process))
    return Result(
        ended=ended,
        status=process.returncode if ended == "exit" else None,
        stdout=output.decode(errors="replace"),
        stderr=errors.decode(errors="replace"),
        wall_s=time.monotonic() - began,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the program and everything that it started, and let its pipes end."""
    await children.stop(process, 0.0)
    for stream in (process.stdout, process.stderr):
        while stream is not None and await stream.read(READ_BYTES):
            pass


async def _read(stream: asyncio.StreamReader, kept: bytearray, limits: Limits) -> None:
    """Read a stream to its end. Raises _TooLong."""
    while part := await stream.read(READ_BYTES):
        room = limits.output_bytes - len(kept)
        kept += part[:room]
        if len(part) > room:
            raise _TooLong
