"""Keeps one server running.

start ──► healthy ──► (load weights) ──► serving ──► died ──► back-off ──► start
  └────────── cancelled, or too many quick deaths in a row: end all processes ──────────┘
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, launch
from agentrl.errors import EngineUnavailable
from agentrl.processes.restarts import Backoff

QUICK_DEATH_S = 60.0
MAX_QUICK_DEATHS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Weights to load after each start, instead of the base weights."""

    path: Path
    version: int


class Observer(Protocol):
    """Receives the server's events."""

    def starting(self, elapsed_s: float, log_line: str) -> None:
        """Called a few times a second during a start."""

    def serving(self, server: Server, start_s: float) -> None:
        """Called when the server is serving the requested weights."""

    def died(self, reason: str, restart_in_s: float) -> None:
        """Called when the server has died, before the restart."""


class EngineSupervisor:
    """Runs one server until cancelled. A restarted server has base weights, or `weights` if given.

    With `restarts` False the first death ends it: the other hosts of the server must start again too.
    """

    def __init__(
        self,
        spec: EngineSpec,
        observer: Observer,
        *,
        weights: Weights | None = None,
        start_timeout_s: float = 300.0,
        restarts: bool = True,
    ) -> None:
        self.spec = spec
        self.server: Server | None = None
        self._observer = observer
        self._weights = weights
        self._start_timeout_s = start_timeout_s
        self._restarts = restarts

    async def run(self) -> None:
        """Run the server forever, and end its processes on exit. Raises EngineUnavailable after MAX_QUICK_DEATHS quick
        deaths in a row or after the first death without restarts, UserError for an unusable model folder or port.
        """
        backoff = Backoff(QUICK_DEATH_S)
        while True:
            reason, lived_s = await self._run_once()
            if not self._restarts:
                raise EngineUnavailable(reason)
            delay_s = backoff.after(lived_s)
            if backoff.quick_deaths == MAX_QUICK_DEATHS:
                raise EngineUnavailable(f"gave up after {MAX_QUICK_DEATHS} quick deaths: {reason}")
            self._observer.died(reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> tuple[str, float]:
        """Run the server once; returns why it ended and how long it served."""
        server = self.server = launch(self.spec)
        try:
            await server.wait_healthy(self._start_timeout_s, self._observer.starting)
            await self._load_weights()
            served_from = time.monotonic()
            self._observer.serving(server, served_from - server.started_at)
            status = await server.wait()
        except EngineUnavailable as error:
            return str(error), 0.0
        finally:
            server.stop()
        return f"the engine ended with status {status}", time.monotonic() - served_from

    async def _load_weights(self) -> None:
        if self._weights is not None:
            async with aiohttp.ClientSession() as http:
                client = BACKENDS[self.spec.backend].client(self.spec.url, http, key=self.spec.key)
                await client.update_weights_from_disk(self._weights.path, self._weights.version)
