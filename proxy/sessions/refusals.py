"""Records model calls that were refused before they became calls in the store, and why.

An agent that misspells a model or asks for too many tokens leaves no call behind. So the refusals of a session become
`refused` events of its run: at most `events.REFUSALS_KEPT` of them, because a client may repeat a call forever.
"""

from __future__ import annotations

import time
from contextlib import suppress

from starlette.requests import Request

from agentrl.errors import RequestError, StoreError
from agentrl.proxy.access.client_names import client_of
from agentrl.proxy.dialects import DIALECTS, of_request
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.proxy.sessions.session_finder import SessionFinder
from agentrl.store import events

LONGEST = 500
"""Characters of a message that are stored."""
NO_ROUTE = "route_not_found"
_NOT_RECORDED = (401, 403, 499)
"""The caller is unknown, or has left."""
_HAS_A_CALL = ("engine_rejected",)


class RefusalLog:
    """Records the refusals of each session."""

    def __init__(self, store: RunStore, finder: SessionFinder) -> None:
        self._store = store
        self._finder = finder
        self._counts: Recent[int] = Recent()  # session id → how many were recorded here

    async def record(self, request: Request, error: RequestError) -> None:
        """Record a refusal of a known session's call, without waiting for the commit."""
        if not 400 <= error.status < 500 or error.status in _NOT_RECORDED or error.code in _HAS_A_CALL:
            return
        with suppress(RequestError, StoreError):
            session_id = await self._session(request, error)
            if session_id is None or self._counts.get(session_id, 0) >= events.REFUSALS_KEPT:
                return
            self._counts[session_id] = self._counts.get(session_id, 0) + 1
            refusal = {
                "session_id": session_id,
                "status": of_request(request.url.path, request.headers).status(error),  # as the client sees it
                "code": error.code,
                "param": error.param and error.param[:LONGEST].replace("\0", ""),
                "message": str(error)[:LONGEST].replace("\0", ""),
                "route": request.url.path[:LONGEST],
                "at": time.time(),
                "client": client_of(request),
            }
            origin = getattr(request.state, "origin", None)
            if origin is not None:  # distinguishes a retry of this call from a retry of another
                refusal |= {"digest": origin.digest, "retry": origin.retry}
            self._store.submit(events.record, self._store.run_id, events.REFUSED, refusal, self._store.replica)

    async def _session(self, request: Request, error: RequestError) -> str | None:
        """The session of a refused model call, also of one to a wrong address.

        Raises RequestError, StoreError.
        """
        if request.method != "POST":
            return None
        if error.code == NO_ROUTE:
            return (await self._finder.access.authenticate(request)).session_id
        if not request.url.path.endswith(tuple(path.removeprefix("/v1") for path in DIALECTS)):  # AReaL has no /v1
            return None
        return await self._finder.of_call(request)
