"""Keeps one server alive.

start ──► healthy ──► (load weights) ──► serving ──► died ──► back-off ──► start
  └────────── cancelled, or too many quick deaths in a row: everything is ended ──────────┘
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from agentrl.engine.server_process import EngineSpec, Server, launch
from agentrl.engine.sglang_client import EngineClient
from agentrl.errors import EngineUnavailable

QUICK_DEATH_S = 60.0
MAX_QUICK_DEATHS = 3
BACKOFF_FIRST_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a server loads right after each start, in place of its base weights."""

    path: Path
    version: int


class Observer(Protocol):
    """Hears what happens to the server."""

    def starting(self, elapsed_s: float, log_line: str) -> None:
        """A few times a second while it starts."""

    def serving(self, server: Server, start_s: float) -> None:
        """It serves, with the weights asked for."""

    def died(self, reason: str, restart_in_s: float) -> None:
        """It ended by itself; a new one follows."""


class EngineSupervisor:
    """Runs one server until cancelled. A restarted server serves base weights, or `weights` if given."""

    def __init__(
        self, spec: EngineSpec, observer: Observer, *, weights: Weights | None = None, start_timeout_s: float = 300.0
    ) -> None:
        self.spec = spec
        self.server: Server | None = None
        self._observer = observer
        self._weights = weights
        self._start_timeout_s = start_timeout_s

    async def run(self) -> None:
        """Never returns. Raises EngineUnavailable after MAX_QUICK_DEATHS quick deaths in a row, UserError for a model
        folder or port that cannot be used. No process is left behind, however it ends."""
        quick_deaths = 0
        while True:
            reason, lived_s = await self._run_once()
            quick_deaths = quick_deaths + 1 if lived_s < QUICK_DEATH_S else 1
            if quick_deaths == MAX_QUICK_DEATHS:
                raise EngineUnavailable(f"gave up after {quick_deaths} quick deaths: {reason}")
            delay_s = BACKOFF_FIRST_S * 2 ** (quick_deaths - 1)
            self._observer.died(reason, delay_s)
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> tuple[str, float]:
        """One life of the server: why it ended, and for how long it had served."""
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
                client = EngineClient(self.spec.url, http, key=self.spec.key)
                await client.update_weights_from_disk(self._weights.path, self._weights.version)
