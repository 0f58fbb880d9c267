"""Serves the dashboard from a database, without a proxy. The printed link is the key to it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from agentrl.dashboard import dashboard_app
from agentrl.dashboard.dashboard_parts import ROOT, Dashboard
from agentrl.dashboard.sign_in import Signer, Viewer
from agentrl.errors import RequestError, UserError
from agentrl.store import Database
from agentrl.store.db.codec import hash_key

GRACEFUL_S = 2


class OneKey:
    """A door for one key, which opens every run of the database."""

    def __init__(self, key: str) -> None:
        self._hash = hash_key(key)

    async def find(self, key_hash: str) -> Viewer:
        """The viewer. Raises RequestError 401."""
        if not secrets.compare_digest(key_hash, self._hash):
            raise RequestError(401, "this key is not the one of the printed link", code="invalid_api_key")
        return Viewer()


def application(database: Database, key: str) -> Starlette:
    """The dashboard of a database, behind one key."""

    async def read(then: Callable[[Any], Any], query: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            return then(database.query(query, *args))

        return await asyncio.to_thread(run)

    pages = dashboard_app.create()
    dashboard_app.install(pages, Dashboard(read=read, door=OneKey(key), signer=Signer(secrets.token_bytes(32))))
    return Starlette(routes=[Route("/", dashboard_app.to_pages), Mount(ROOT, pages)])


def serve(database: Database, host: str, port: int, page: str, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; calls `ready` with the link that signs in and opens `page`.

    Raises UserError when the port is taken.
    """
    key = f"arl-ui-{secrets.token_urlsafe(24)}"
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; --port 0 takes a free one") from error
    with listener:
        address = f"[{host}]" if ":" in host else host
        ready(f"http://{address}:{listener.getsockname()[1]}{ROOT}/sign-in?next={quote(page)}#{key}")
        config = uvicorn.Config(
            application(database, key), log_config=None, access_log=False, timeout_graceful_shutdown=GRACEFUL_S
        )
        uvicorn.Server(config).run(sockets=[listener])
