"""Sends a worker's heartbeats, which keep its sessions from being abandoned."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentrl.client import AsyncClient

log = logging.getLogger(__name__)
EVERY_S = 5.0
BEATS_PER_TIMEOUT = 6
"""Minimum number of heartbeats per timeout, so that a few may be lost."""
HUNG_PER_TIMEOUT = 3
"""A heartbeat without an answer is cancelled after the timeout divided by this, and the next one is sent."""


@asynccontextmanager
async def beating(client: AsyncClient, owner: str, running: Callable[[], int] = lambda: 0) -> AsyncIterator[None]:
    """Send the first heartbeat of `owner`, then one every few seconds until the block ends.

    `running` returns how many sessions it runs.

    Raises RequestError when the first fails. A later failure is logged, and heartbeats continue.
    """
    silence_s = await _beat(client, owner, running(), client.timeout_s)
    task = asyncio.create_task(_keep_beating(client, owner, running, silence_s), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _keep_beating(client: AsyncClient, owner: str, running: Callable[[], int], silence_s: float) -> None:
    while True:
        await asyncio.sleep(min(EVERY_S, silence_s / BEATS_PER_TIMEOUT))
        patience_s = silence_s / HUNG_PER_TIMEOUT
        try:
            async with asyncio.timeout(patience_s):
                silence_s = await _beat(client, owner, running(), patience_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, without the next beat the sessions are abandoned
            log.warning("a heartbeat failed: %r", error)


async def _beat(client: AsyncClient, owner: str, sessions: int, timeout_s: float) -> float:
    """Send a heartbeat; returns the timeout that the run allows."""
    about = {"host": socket.gethostname(), "pid": os.getpid(), "sessions": sessions}
    answer = await client.request("POST", "/heartbeat", {"owner": owner, "about": about}, timeout_s=timeout_s)
    return float(answer["heartbeat_timeout_s"])
