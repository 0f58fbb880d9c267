"""Versions that an engine prepares while it serves another, and swaps in under a pause."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentrl.domain.schemas import Json
from agentrl.engine.control.control_requests import ControlRequests, rank_digests
from agentrl.engine.control.preparation import (
    DIGESTS,
    PREPARE,
    PREPARED,
    SWAP,
    VERSIONS,
    Order,
    Preparation,
    preparation_of,
)
from agentrl.errors import CannotPrepare, EngineError, EngineRejected, NotPrepared
from agentrl.versions.read_tokens import read_token

NOT_FOUND, CONFLICT = 404, 409
PREPARATION_TIMEOUT_S = 60.0
"""The first request waits for the scheduler, which may be computing a long prompt."""


class PreparedControls(ControlRequests):
    """The `/agentrl/` routes of one server."""

    async def prepare(self, order: Order, timeout_s: float = PREPARATION_TIMEOUT_S) -> Preparation:
        """Begin to fetch and stage a version; returns at once. The server goes on serving the version that it has.

        It replaces a preparation of another version, and does nothing for the one that is being prepared. Raises
        CannotPrepare for a server that was not started by agentrl, EngineRejected for an invalid order.
        """
        async with _named_errors():
            answer = await self._call("POST", PREPARE, order.model_dump(mode="json"), timeout_s)
        return preparation_of(answer, f"{self.url}{PREPARE}")

    async def preparation(self, timeout_s: float = PREPARATION_TIMEOUT_S) -> Preparation | None:
        """How far the server is; None when it cannot prepare versions."""
        try:
            async with _named_errors():
                answer = await self._call("GET", PREPARED, None, timeout_s)
        except CannotPrepare:
            return None
        return preparation_of(answer, f"{self.url}{PREPARED}")

    async def prepared_digests(self, name: str, timeout_s: float = PREPARATION_TIMEOUT_S) -> list[dict[str, str]]:
        """Digests of the staged weights for each rank: those that `checksums` gives after the swap.

        Raises NotPrepared unless version `name`, ordered with `digests`, is ready.
        """
        async with _named_errors():
            answer = await self._call("GET", DIGESTS, None, timeout_s)
        if answer.get("name") != name:
            raise NotPrepared(f"{self.url} has prepared {answer.get('name')}, not {name}")
        return rank_digests(f"{self.url}{DIGESTS}", answer.get("ranks"))

    def version_source(self, name: str, until: int) -> Json | None:
        """How other hosts read version `name` and older ones from this server, until then, in seconds of the epoch.

        None for a server behind a reverse proxy with a password, which a read token does not pass.
        """
        if self._key is not None and ":" in self._key:
            return None
        url = f"{self.url}{VERSIONS}".rstrip("/")
        return {"kind": "http", "url": url, "token": read_token(self._key or "", name, until)}

    async def swap(self, name: str, version: int, *, flush_cache: bool = True, timeout_s: float | None = None) -> float:
        """Make the prepared weights those in use, and report `version` from then on; returns the seconds of work.

        The server must be paused. Raises NotPrepared when nothing was changed; after any other EngineError the weights
        are unknown, and the server must load a version before it continues.
        """
        body = {"name": name, "version": version, "flush_cache": flush_cache}
        async with _named_errors():
            answer = await self._call("POST", SWAP, body, timeout_s)
        seconds = answer.get("swap_s")
        if answer.get("success") is not True or not isinstance(seconds, (int, float)):
            raise EngineError(f"{self.url} did not swap {name} in: {answer.get('message')}")
        return float(seconds)


@asynccontextmanager
async def _named_errors() -> AsyncIterator[None]:
    """Raise CannotPrepare for a 404, NotPrepared for a 409."""
    try:
        yield
    except EngineRejected as error:
        kind = {NOT_FOUND: CannotPrepare, CONFLICT: NotPrepared}.get(error.status or 0)
        if kind is None:
            raise
        raise kind(str(error), engine_message=error.engine_message, status=error.status) from error
