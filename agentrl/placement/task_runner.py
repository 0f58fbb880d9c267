"""Runs one process of a part on the host where a scheduler put it: `agentrl task`.

    claim the rank ──► choose ports ──► announce them ──► (gang: meet the others) ──► run the command behind a guard
         ▲                  ▲                                                               │
         └── lease lost ────┴────── died: back-off, next attempt ◄──────────────────────────┤
                                                              done, given up, asked to stop ┴──► release, exit

The scheduler starts a runner again unless it exits with status 0: then the process is done, was asked to stop, or the
part was given up (its row says why, and the run's supervisor reports it).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.environment import STORAGE, for_child, with_storage
from agentrl.errors import root_cause
from agentrl.files import last_lines
from agentrl.placement.local_address import interface_of, local_port
from agentrl.placement.part_spec import PROXY, PartSpec, filled
from agentrl.placement.proxy_relay import Address, ProxyRelay
from agentrl.placement.rank_lease import RankLease
from agentrl.processes import children
from agentrl.processes.restarts import USER_ERROR_STATUS, Backoff, gave_up
from agentrl.store import Database, runs
from agentrl.store.part_ranks import Rank

log = logging.getLogger(__name__)
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables by which the ranks of a gang connect over the network of the addresses that they announce."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class _Ended:
    """A command ended by itself, in an attempt, after `lived_s`; its output begins at `log_start`."""

    status: int
    attempt: int
    lived_s: float
    log_start: int


class TaskRunner:
    """Owns one rank of a part, and its command."""

    def __init__(
        self,
        database: Database,
        run_id: str,
        spec: PartSpec,
        rank: int,
        *,
        run_dir: Path,
        secrets: Mapping[str, str],
        address: str,
    ) -> None:
        self._database = database
        self._run_id = run_id
        self._spec = spec
        self._secrets = secrets
        here = socket.gethostname()
        self._lease = RankLease(database, run_id, spec.name, rank, host=here, address=address, fenced=spec.fenced)
        self._relay = ProxyRelay(self._live_proxies)
        self._backoff = Backoff()
        stem = spec.name if spec.ranks == 1 else f"{spec.name}-{rank}"
        self._log_file = run_dir / "logs" / f"{stem}.log"

    async def run(self) -> None:
        """Run the rank until it is done, asked to stop, or given up. On cancellation, end the command and the lease."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        if self._spec.uses_proxy:
            await self._relay.start()
        try:
            while True:
                before = await self._lease.claim()
                if before is None:
                    return
                if await self._held(before):
                    return
        finally:
            await self._relay.close()

    async def _held(self, before: Rank) -> bool:
        """Run the command while the lease is held; returns whether the rank is over, False when the lease was lost."""
        try:
            async with asyncio.TaskGroup() as group:
                renewal = group.create_task(self._lease.keep())
                await self._take_over(before)
                status = await self._work()
                renewal.cancel()
        except ExceptionGroup as problem:
            if not self._lease.lost:
                raise
            log.warning("%s/%d: %s", self._lease.part, self._lease.rank, root_cause(problem))
            return False
        except asyncio.CancelledError:
            await asyncio.shield(self._lease.release(None))
            raise
        await self._lease.release(status)
        return True

    async def _take_over(self, before: Rank) -> None:
        """Move a gang to its next attempt when an earlier runner of this rank was lost while it worked on this one."""
        if self._spec.gang and before.attempt == self._lease.order.attempt:
            await self._lease.died(before.attempt, None, gang=True)
            await self._lease.refresh()

    async def _work(self) -> int | None:
        """Start the command for each attempt until the rank is over; returns its last exit status."""
        status: int | None = None
        while not self._lease.over:
            attempt = self._lease.order.attempt
            values = await self._prepared(attempt)
            if values is None:
                continue
            ended = await self._run_command(attempt, values)
            if ended is None:
                continue
            status = ended.status
            if self._spec.ends and (status == 0 or self._spec.gang) and await self._run_is_finished():
                break
            await self._after_death(ended)
        return status

    async def _prepared(self, attempt: int) -> dict[str, str] | None:
        """Choose and announce ports, and meet the gang; the values for the command, or None when the order changed."""
        ports = {name: local_port(name) for name in self._spec.ports}
        await self._lease.announce(attempt, ports)
        values = {
            "python": sys.executable,
            "rank": str(self._lease.rank),
            "size": str(self._spec.ranks),
            "address": self._lease.address,
        }
        values |= {f"port:{name}": str(port) for name, port in ports.items()}
        if self._spec.uses_proxy:
            values["proxy"] = self._relay.url
        if not self._spec.gang:
            return values
        leader = await self._met(attempt)
        if leader is None:
            return None
        values["leader"] = leader.address
        return values | {f"leader_port:{name}": str(port) for name, port in leader.ports.items()}

    async def _met(self, attempt: int) -> Rank | None:
        """Wait until every rank of the gang has announced the attempt; rank 0, or None when the order changed."""
        while not self._must_end(attempt):
            ranks = await self._lease.ranks()
            ready = [rank for rank in ranks if rank.attempt == attempt and rank.live]
            if len(ready) == self._spec.ranks:
                return ready[0]
            await asyncio.sleep(POLL_S)
        return None

    async def _run_command(self, attempt: int, values: Mapping[str, str]) -> _Ended | None:
        """Run the command; None when it was ended because the order changed."""
        env = for_child(os.environ)
        if self._spec.gang and (interface := interface_of(self._lease.address)) is not None:
            env = dict.fromkeys(INTERFACE_VARIABLES, interface) | env
        env |= {name: filled(text, values) for name, text in self._spec.env.items()}
        given = {name: self._secrets[name] for name in self._spec.secrets if name in self._secrets}
        env |= given
        if STORAGE & set(self._spec.secrets):
            env |= with_storage(given, os.environ)
        argv = [filled(word, values) for word in self._spec.argv]
        started = time.monotonic()
        with self._log_file.open("ab") as output:
            log_start = output.tell()
            process = await children.start(argv, env=env, stdout=output, stderr=output)
        ended = asyncio.ensure_future(process.wait())
        try:
            await self._lease.started(process.pid)
            await self._ended_or_unwanted(ended, attempt)
        finally:
            if not ended.done():
                await asyncio.shield(self._end(process))
        status = await ended
        return None if self._must_end(attempt) else _Ended(status, attempt, time.monotonic() - started, log_start)

    async def _ended_or_unwanted(self, ended: asyncio.Future[int], attempt: int) -> None:
        """Wait until the command has ended, or the order asks for its end."""
        while not ended.done() and not self._must_end(attempt):
            self._lease.changed.clear()
            changed = asyncio.ensure_future(self._lease.changed.wait())
            either: set[asyncio.Future[Any]] = {ended, changed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    def _must_end(self, attempt: int) -> bool:
        """Whether a command of this attempt is no longer wanted."""
        return self._lease.over or (self._spec.gang and self._lease.order.attempt != attempt)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """End the command: with its grace while the lease is held, else at once, before its successor starts."""
        if self._lease.lost and self._spec.fenced:
            children.kill_tree(process.pid)
            await process.wait()
        else:
            await children.stop(process, self._spec.grace_s)

    async def _after_death(self, ended: _Ended) -> None:
        """Count a death. Give the part up after too many, or after a user's error; else wait before the next start."""
        (last_line,) = last_lines(self._log_file, 1, ended.log_start) or ["no output"]
        deaths = await self._lease.died(ended.attempt, ended.status, gang=self._spec.gang)
        why = None
        if ended.status == USER_ERROR_STATUS:
            why = last_line.removeprefix("agentrl: ")
        elif deaths > self._spec.max_restarts:
            why = gave_up(self._lease.part, deaths, ended.status, last_line, self._log_file)
        if why is not None:
            await self._lease.give_up(why)
        await self._lease.refresh()
        if not self._lease.over:
            await asyncio.sleep(self._backoff.after(ended.lived_s))

    async def _live_proxies(self) -> list[Address]:
        """The addresses of the run's proxies that are alive."""
        ranks = await self._lease.ranks(PROXY)
        live = [rank for rank in ranks if rank.live and rank.state == "running" and "http" in rank.ports]
        return [(rank.address, rank.ports["http"]) for rank in live]

    async def _run_is_finished(self) -> bool:
        run = await asyncio.to_thread(self._database.query, runs.get, self._run_id)
        return bool(run.published_step >= run.target_steps)
