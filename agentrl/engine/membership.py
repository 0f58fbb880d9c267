"""Keeps an engine in a run's fleet: it joins when it serves, renews its lease, and leaves at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.engine_keys import derived_key, key_digest
from agentrl.engine.engine_spec import EngineSpec
from agentrl.errors import UserError

log = logging.getLogger(__name__)
LEASE_S = 30.0
RENEW_EVERY_S = LEASE_S / 3
RETRY_S = 1.0
TIMEOUT_S = 10.0
LEFT_S = 2.0
"""Time after leaving until every replica has noticed: each reads the fleet once a second."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine joins: the URL of a proxy, its admin key, and the URL at which proxies reach the engine."""

    proxy: str
    key: str = field(repr=False)
    advertised: str
    has_own_key: bool = False  # the engine requires the key derived from `key` and `advertised`


class Membership:
    """Joins, renews and leaves for one engine."""

    def __init__(self, client: EngineClient, http: aiohttp.ClientSession, place: Place) -> None:
        self._client = client
        self._http = http
        self._proxy = place.proxy.rstrip("/")
        self._headers = {"Authorization": f"Bearer {place.key}"}
        self._advertised = place.advertised
        own = key_digest(derived_key(place.key, place.advertised)) if place.has_own_key else None
        self._join = {"url": place.advertised, "lease_s": LEASE_S, "key_digest": own, "backend": client.backend}
        self.joined = False

    async def keep(self) -> None:
        """Join, and renew the lease while the engine serves, until cancelled. Waits for a proxy that does not answer.

        Raises UserError when the proxy refuses the engine or the key.
        """
        while True:
            pause_s = RETRY_S
            if await self._client.health() is Health.SERVING:
                try:
                    await self._post("join", self._join)
                    self.joined, pause_s = True, RENEW_EVERY_S
                except (aiohttp.ClientError, TimeoutError) as error:
                    log.warning("%s does not answer: %s; trying again", self._proxy, error or "time-out")
            await asyncio.sleep(pause_s)

    async def leave(self) -> None:
        """Leave the run, if the engine has joined it. A proxy that does not answer lets the lease end instead."""
        if self.joined:
            try:
                await self._post("leave", {"url": self._advertised})
                self.joined = False
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("%s does not answer: %s; the lease ends in %g s", self._proxy, error, LEASE_S)

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        url, timeout = f"{self._proxy}/api/engines/{path}", aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self._http.post(url, json=body, headers=self._headers, timeout=timeout) as answer:
            if answer.status in (400, 401, 403, 404, 409, 422):
                raise UserError(f"{self._proxy} refused {self._advertised}: {(await answer.text())[:300]}")
            answer.raise_for_status()


@asynccontextmanager
async def member(spec: EngineSpec, place: Place | None) -> AsyncIterator[None]:
    """Keep the server of `spec` in a run while the block runs; without a place, do nothing."""
    if place is None:
        yield
        return
    async with aiohttp.ClientSession() as http:
        membership = Membership(BACKENDS[spec.backend].client(spec.url, http, key=spec.key), http, place)
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(membership.keep())
            try:
                yield
            finally:
                keeping.cancel()
                if membership.joined:
                    await membership.leave()
                    await asyncio.sleep(LEFT_S)
