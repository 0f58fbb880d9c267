"""What all routes of the dashboard use: the store, the sign-in, the shared pages, the live updates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from agentrl.dashboard.live_updates import LiveUpdates
from agentrl.dashboard.shared_pages import SharedPages
from agentrl.dashboard.sign_in import COOKIE, Door, Signer, Viewer
from agentrl.errors import RequestError
from agentrl.store.views import change_mark

ROOT = "/ui"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
FOREVER = {**HEADERS, "cache-control": "private, max-age=31536000, immutable"}
PAGES_AT_ONCE = 2
"""Pages that a process makes at the same time; others wait, so that readers leave threads to the recording."""


class Read(Protocol):
    """Reads the store in a thread: `then(query(conn, …))`, the query in one transaction."""

    async def __call__(self, then: Callable[[Any], Any], query: Callable[..., Any], /, *args: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Dashboard:
    """The parts that the routes use. `secure` keeps the cookie to HTTPS."""

    read: Read
    door: Door
    signer: Signer
    secure: bool = False
    shared: SharedPages[bytes] = field(default_factory=SharedPages)
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PAGES_AT_ONCE))
    live: LiveUpdates = field(init=False)

    def __post_init__(self) -> None:
        async def mark(run_id: str) -> str:
            found: str = await self.read(str, change_mark.of_run, run_id)
            return found

        object.__setattr__(self, "live", LiveUpdates(mark))


def dashboard_of(request: Request) -> Dashboard:
    """The parts of the application that answers."""
    found: Dashboard = request.app.state.dashboard
    return found


async def viewer_of(request: Request) -> Viewer:
    """Who looks. Raises RequestError 401, 403."""
    dashboard = dashboard_of(request)
    key_hash = dashboard.signer.key_hash(request.cookies.get(COOKIE, ""))
    if key_hash is None:
        raise RequestError(401, "sign in with a key", code="missing_api_key")
    return await dashboard.door.find(key_hash)
