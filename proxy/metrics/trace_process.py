"""Keeps `agentrl spans --follow` running on one of the run's proxies, where the run sends spans.

    every proxy ── is it mine? (rendezvous hashing over the live replicas) ──► yes: one child process, kept running
                                                                               no: none

Spans are made and sent in a process of their own, at a lower priority, so that they delay no call. The sessions wait in
the store: a death of the process or of its proxy loses none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from agentrl.configs.metrics_config import TracesConfig
from agentrl.environment import DATABASE_URL, for_child
from agentrl.processes import children
from agentrl.processes.restarts import USER_ERROR_STATUS, Backoff
from agentrl.proxy.engines.pool import EnginePool
from agentrl.proxy.engines.watchers import watched_by
from agentrl.proxy.run_store import RunStore

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
AFTER_USER_ERROR_S = 600.0
AFTER_FAILED_START_S = 30.0
GRACE_S = 3.0
"""How long the process may go on when it is stopped, to send what waits."""


@dataclass(slots=True)
class TraceProcess:
    """The process of one proxy that sends spans."""

    store: RunStore
    pool: EnginePool
    config: TracesConfig | None

    async def run(self) -> None:
        """Keep the process running while it is this proxy's to run; returns at once where the run sends no spans."""
        if self.config is None:
            return
        process: subprocess.Popen[bytes] | None = None
        backoff, started, start_at = Backoff(), 0.0, 0.0
        try:
            while True:
                now = time.monotonic()
                if process is not None and (status := process.poll()) is not None:
                    await self._stop(process)  # closes the pipe
                    process = None
                    wait_s = AFTER_USER_ERROR_S if status == USER_ERROR_STATUS else backoff.after(now - started)
                    start_at = now + wait_s
                    log.warning("the process that sends spans ended with status %d", status)
                if process is None and self._is_mine() and now >= start_at:
                    started, process = now, await asyncio.to_thread(self._start)
                    start_at = now if process is not None else now + AFTER_FAILED_START_S
                elif process is not None and not self._is_mine():
                    await self._stop(process)
                    process = None
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if process is not None:
                await self._stop(process)

    def _is_mine(self) -> bool:
        """Whether this proxy runs the process, of all live ones; false before they are known."""
        live = self.pool.live_replicas
        return bool(live) and bool(watched_by(self.store.replica, [self.store.run_id], live, 1))

    def _start(self) -> subprocess.Popen[bytes] | None:
        """The started process; None where the system starts none."""
        argv = [sys.executable, "-m", "agentrl", "spans", "--follow", "--run", self.store.run_name]
        env = for_child(os.environ) | {DATABASE_URL: self.store.database.url}
        try:
            return children.start_blocking(argv, env=env, output=None, nice=True)
        except OSError as error:
            log.warning("the process that sends spans cannot be started: %s", error)
            return None

    async def _stop(self, process: subprocess.Popen[bytes]) -> None:
        await asyncio.to_thread(children.stop_blocking, process, GRACE_S)
