"""One server as a child process: start, log file, shutdown.

    launch(spec) ──► Server ──► await wait_healthy(on_progress) ──► … ──► stop()

A guard process (guard.py) is the server's parent. It ends the server and its children on request or when this process
dies.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import aiohttp

from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.engine_spec import EngineSpec
from agentrl.environment import is_loopback
from agentrl.errors import EngineUnavailable, UserError
from agentrl.files import last_lines
from agentrl.models import check_model_folder
from agentrl.processes import children

POLL_S = 0.25
FIRST_PORT = 10_240
USUAL_FIRST_EPHEMERAL = 32_768
EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

Progress = Callable[[float, str], None]
"""Called during a start, with the elapsed seconds and the last line of the log."""


def launch(spec: EngineSpec) -> Server:
    """Start a server without waiting for it.

    Raises UserError for an unusable model folder or port, and for a host off loopback without a key.
    """
    if spec.key is None and not is_loopback(spec.host):
        raise UserError(f"host {spec.host} is not loopback: an engine there needs a key")
    check_model_folder(spec.model)
    check_port(spec.host, spec.port)
    command = BACKENDS[spec.backend]
    spec.log_file.parent.mkdir(parents=True, exist_ok=True)
    with spec.log_file.open("ab") as log:
        log_start = log.tell()
        process = children.start_blocking(command.argv(spec), env=command.environment(spec), output=log)
    return Server(spec, process, log_start)


class Server:
    """A launched server, in any state."""

    def __init__(self, spec: EngineSpec, process: subprocess.Popen[bytes], log_start: int = 0) -> None:
        self.spec = spec
        self.url = spec.url
        self.started_at = time.monotonic()
        self._process = process
        self._log_start = log_start

    @property
    def pid(self) -> int:
        """Process id of the guard, which is the server's parent."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.poll()

    async def wait_healthy(self, timeout_s: float = 300.0, on_progress: Progress | None = None) -> None:
        """Wait until the server is healthy. Raises EngineUnavailable, with the end of its log, when it dies or times
        out.
        """
        async with aiohttp.ClientSession() as http:
            client = BACKENDS[self.spec.backend].client(self.url, http, key=self.spec.key)
            while not await self._is_up(client):
                elapsed_s = time.monotonic() - self.started_at
                if self.returncode is not None:
                    raise EngineUnavailable(f"the engine ended with status {self.returncode}{self._log_excerpt()}")
                if elapsed_s > timeout_s:
                    raise EngineUnavailable(f"the engine is not healthy after {timeout_s:.0f} s{self._log_excerpt()}")
                if on_progress is not None:
                    on_progress(elapsed_s, "".join(self._log_end(1)))
                await asyncio.sleep(POLL_S)

    async def _is_up(self, client: EngineClient) -> bool:
        if self.spec.host_rank:
            return await client.follows()
        return await client.health() is Health.SERVING

    async def wait(self) -> int:
        """Wait for the server's end; returns its exit status."""
        while True:
            if (status := self.returncode) is not None:
                return status
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        """End the server and its children; returns when all have ended."""
        children.stop_blocking(self._process)

    def _log_end(self, n: int) -> list[str]:
        return last_lines(self.spec.log_file, n, self._log_start)

    def _log_excerpt(self) -> str:
        return "; its log ends:\n  " + "\n  ".join(self._log_end(8)) + f"\n(full log: {self.spec.log_file})"


def check_port(host: str, port: int) -> None:
    """Raise UserError when host:port cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def free_port(host: str = "127.0.0.1") -> int:
    """A random free port. Raises UserError when there is none.

    It is below the system's ephemeral ports, so that no connection takes it before the server binds it. Random choice
    makes collisions between processes rare.
    """
    ports = _ports_to_choose()
    start = secrets.randbelow(len(ports))
    for port in (*ports[start:], *ports[:start]):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise UserError(f"cannot listen on {host}: {error.strerror}") from error
            else:
                return int(probe.getsockname()[1])
    raise UserError(f"no free port on {host}")


def _ports_to_choose() -> Sequence[int]:
    """The ports below the system's ephemeral range; 0 (the system's choice) when there are none."""
    try:
        first_ephemeral = int(EPHEMERAL_RANGE_FILE.read_text().split()[0])
    except OSError:  # not Linux
        first_ephemeral = USUAL_FIRST_EPHEMERAL
    return range(FIRST_PORT, first_ephemeral) or (0,)


def pick_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Resolve `auto` to CUDA when torch finds a GPU."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
