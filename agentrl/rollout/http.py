"""The HTTP clients that agents share: an httpx client, and an httpx2 client for anthropic 2 where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    import httpx2

CONNECT_PATIENCE_S = 120.0
"""How long a call retries to connect to a restarting proxy."""
KEPT_ALIVE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentHttp:
    """The shared clients, open until the block of `agent_http` ends. `second` is None without httpx2."""

    first: httpx.AsyncClient
    second: httpx2.AsyncClient | None

    def extra(self, base_url: str, api_key: str) -> dict[str, Any]:
        """The keyword arguments of an agent's `run`: those of `AsyncOpenAI`, and those of `AsyncAnthropic` under
        `anthropic`.
        """
        own = {"base_url": base_url.removesuffix("/v1"), "api_key": api_key, "http_client": self.second or self.first}
        return {"base_url": base_url, "api_key": api_key, "http_client": self.first, "anthropic": own}


class _Patience:
    """A transport that retries refused connections. No request was sent yet, so a retry samples nothing twice."""

    refused: type[Exception]

    async def handle_async_request(self, request: Any) -> Any:
        """Send a request, retrying until a connection is made."""
        deadline, pause_s = time.monotonic() + CONNECT_PATIENCE_S, 0.1
        while True:
            try:
                return await super().handle_async_request(request)  # type: ignore[misc]
            except self.refused:
                if time.monotonic() + pause_s > deadline:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)


class PatientTransport(_Patience, httpx.AsyncHTTPTransport):
    """The transport for httpx."""

    refused = httpx.ConnectError


@cache
def certificates() -> ssl.SSLContext:
    """The certificates that all clients of a process trust. Reading them takes a tenth of a second."""
    return httpx.create_ssl_context()


@asynccontextmanager
async def agent_http(timeout_s: float) -> AsyncIterator[AgentHttp]:
    """Open the shared clients."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_ALIVE)
    async with AsyncExitStack() as stack:
        transport = PatientTransport(limits=limits, verify=certificates())
        first = await stack.enter_async_context(
            httpx.AsyncClient(transport=transport, timeout=timeout_s, verify=certificates())
        )
        second = None
        if importlib.util.find_spec("httpx2") is not None:
            second = await stack.enter_async_context(_second(timeout_s))
        yield AgentHttp(first=first, second=second)


def _second(timeout_s: float) -> httpx2.AsyncClient:
    import httpx2

    class PatientTransport2(_Patience, httpx2.AsyncHTTPTransport):
        refused = httpx2.ConnectError

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT_ALIVE)
    transport = PatientTransport2(limits=limits, verify=certificates())
    return httpx2.AsyncClient(transport=transport, timeout=timeout_s, verify=certificates())
