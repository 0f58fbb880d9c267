"""A worker's heartbeat: while it is sent, the proxies know that the worker's sessions are being played."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.client import AsyncClient

log = logging.getLogger(__name__)
EVERY_S = 5.0
BEATS_PER_TIMEOUT = 6
"""At least so many beats fit into the silence that the run allows, so that a few may get lost."""
HUNG_PER_TIMEOUT = 3
"""So many beats that hang make the silence: each is given up after its part of it, and the next one is sent."""


@asynccontextmanager
async def beating(client: AsyncClient, owner: str) -> AsyncIterator[None]:
    """Send the first heartbeat of `owner`, then one every few seconds until the block ends.

    The first is waited for as long as the client waits; raises RequestError. Later ones may fail for any reason: it is
    logged, and the next one is sent all the same.
    """
    silence_s = await _beat(client, owner, client.timeout_s)
    task = asyncio.create_task(_keep_beating(client, owner, silence_s), name="heartbeat")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _keep_beating(client: AsyncClient, owner: str, silence_s: float) -> None:
    while True:
        await asyncio.sleep(min(EVERY_S, silence_s / BEATS_PER_TIMEOUT))
        patience_s = silence_s / HUNG_PER_TIMEOUT
        try:
            async with asyncio.timeout(patience_s):
                silence_s = await _beat(client, owner, patience_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, without the next beat the sessions are abandoned
            log.warning("a heartbeat failed: %r", error)


async def _beat(client: AsyncClient, owner: str, timeout_s: float) -> float:
    """Returns how many seconds the worker may be silent."""
    answer = await client.request("POST", "/heartbeat", {"owner": owner}, timeout_s=timeout_s)
    return float(answer["heartbeat_timeout_s"])
