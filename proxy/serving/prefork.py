"""`agentrl proxy --workers N`: a parent that holds the listening socket, and N processes that accept from it.

    parent ── binds, starts, restarts, stops ──► worker 0 … N-1   (agentrl/proxy/serving/replica.py)
        └── a socket pair with each: the worker announces that it serves; each side sees when the other dies

A connection waits in the shared socket until a worker accepts it. A worker that dies loses only the connections that
it has accepted. A restarted worker keeps its replica name, and finds by this name the calls that it left running.
`uvicorn --workers` would give the workers no names and restart them without back-off. The parent imports nothing of the
proxy.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from prometheus_client.multiprocess import mark_process_dead

from agentrl.processes.restarts import Backoff

log = logging.getLogger(__name__)

GRACEFUL_S = 10
"""How long a worker that is stopped may finish its running calls."""
STOP_S = GRACEFUL_S + 5.0
"""Seconds after SIGTERM until a worker that still runs is killed."""
SERVES = b"s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The command line of a worker; its secrets are in its environment."""

    run_name: str
    engine_urls: list[str]
    replica: str  # name of the parent; the name of a worker is `replica/index`
    log_level: str
    listener: int
    index: int = 0
    parent: int = -1  # the worker's end of the socket pair

    def argv(self) -> list[str]:
        """The command that starts the worker."""
        return [sys.executable, "-m", "agentrl.proxy.serving.replica", json.dumps(asdict(self))]


def supervise(job: Job, count: int, env: dict[str, str], serving: Callable[[], None]) -> int:
    """Run `count` workers until SIGTERM or Ctrl-C; returns the exit status. A second signal kills them at once.

    The status is 0 after a requested stop, 1 if a worker had to be killed. If the first worker ends before it serves,
    the others would too: its status is returned. `env` is added to the workers' environment. `serving` is called once
    the first worker serves.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-metrics-", ignore_cleanup_errors=True) as metrics:
        env = os.environ | env | {"PROMETHEUS_MULTIPROC_DIR": metrics}
        return asyncio.run(_Parent(job, count, env, serving).run())


class _Parent:
    def __init__(self, job: Job, count: int, env: dict[str, str], serving: Callable[[], None]) -> None:
        self._job = job
        self._count = count
        self._env = env
        self._serving = serving
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._served = asyncio.Event()  # at least one worker has served
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        first = asyncio.create_task(self._keep(0))
        served = asyncio.create_task(self._served.wait())
        await asyncio.wait([first, served], return_when=asyncio.FIRST_COMPLETED)
        if self._served.is_set():
            self._serving()
            await asyncio.gather(first, *(self._keep(index) for index in range(1, self._count)))
        served.cancel()
        return self._status

    def _stop(self) -> None:
        again = self._stopping.is_set()
        self._stopping.set()
        for process in self._processes.values():
            _signal(process, kill=again)
        if not again:
            log.info("stopping %d workers; a second signal kills them", len(self._processes))
            asyncio.get_running_loop().call_later(STOP_S, self._kill_rest)

    def _kill_rest(self) -> None:
        for index, process in self._processes.items():
            log.error("worker %d did not stop in %g s: killing it", index, STOP_S)
            self._status = 1
            _signal(process, kill=True)

    async def _keep(self, index: int) -> None:
        """Run a worker, and restart it when it ends, until the parent stops."""
        backoff = Backoff()
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once(index)
            if self._stopping.is_set():
                return
            if not self._served.is_set():
                self._status = status if status > 0 else 1
                return
            pause_s = backoff.after(time.monotonic() - started)
            log.warning(
                "worker %d ended with status %d: starting it again%s",
                index,
                status,
                f" in {pause_s:g} s" if pause_s else "",
            )
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _run_once(self, index: int) -> int:
        """Run a worker once; returns its exit status, negative after a signal."""
        # Drops the gauges of the previous process of this worker.
        mark_process_dead(index, self._env["PROMETHEUS_MULTIPROC_DIR"])  # type: ignore[no-untyped-call]
        ours, theirs = socket.socketpair()
        with ours:
            ours.setblocking(False)
            with theirs:
                job = replace(self._job, index=index, parent=theirs.fileno())
                process = await asyncio.create_subprocess_exec(
                    *job.argv(),
                    env=self._env,
                    pass_fds=[job.listener, job.parent],
                    stdin=asyncio.subprocess.DEVNULL,
                )
            self._processes[index] = process
            if self._stopping.is_set():
                _signal(process, kill=False)
            waiting = asyncio.create_task(self._wait_until_serving(ours, index, process.pid))
            try:
                return await process.wait()
            finally:
                waiting.cancel()
                await asyncio.wait([waiting])
                del self._processes[index]

    async def _wait_until_serving(self, worker: socket.socket, index: int, pid: int) -> None:
        if await asyncio.get_running_loop().sock_recv(worker, 1) == SERVES:
            log.info("worker %d serves (process %d)", index, pid)
            self._served.set()


def _signal(process: asyncio.subprocess.Process, *, kill: bool) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
