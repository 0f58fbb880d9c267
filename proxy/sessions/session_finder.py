"""Finds the session that a request belongs to.

x-parent-session-id + X-Session-ID ─► a sub-agent's session   (subagents)
/sessions/ID/… ─────────────────────► that session
X-Session-ID ───────────────────────► that session, by id or by name   (named_sessions)
a session key ──────────────────────► its session
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from agentrl.errors import RequestError, no_session
from agentrl.proxy.access.authentication import PARENT_HEADER, Access, Power
from agentrl.proxy.calls.live_sessions import LiveSessions
from agentrl.proxy.run_store import RunStore
from agentrl.proxy.sessions import named_sessions, subagents
from agentrl.store.sessions import session_lookup


@dataclass(frozen=True, slots=True)
class SessionFinder:
    """Authenticates a request and finds its session. With `by_name`, run keys may name sessions."""

    store: RunStore
    access: Access
    sessions: LiveSessions
    by_name: bool

    async def of_call(self, request: Request, *, opens: bool = False) -> str:
        """The session of a model call. With `opens`, an unknown name in X-Session-ID opens a session.

        Raises RequestError as `resolve` does, 403 for a key that names no session.
        """
        if (of_subagent := await self._of_subagent(request)) is not None:
            return of_subagent
        in_url: str | None = request.path_params.get("session_id")
        if in_url is not None:
            return await self.resolve(request, in_url)
        if (in_header := request.headers.get(named_sessions.HEADER)) is not None:
            return await self.resolve(request, in_header, opens=opens)
        caller = await self.access.authenticate(request)
        if caller.session_id is None:
            raise RequestError(
                403,
                f"a {caller.power} key does not name a session: use a session key, /sessions/ID/v1 or X-Session-ID",
                code="session_required",
            )
        return caller.session_id

    async def resolve(self, request: Request, named: str, *, opens: bool = False) -> str:
        """The id of the session that a caller names by its id or name. With `opens`, an unknown name opens a session.

        Raises RequestError: 401 and 403 for the key, 404 for an unknown session, 400 for an invalid name, 429 while
        admission refuses.
        """
        caller = await self.access.authenticate(request)
        if caller.power is Power.SESSION or not self.by_name:
            await self.access.session_caller(request, named)
            return named
        known = self.sessions.named
        key_hash = named_sessions.key_hash_of(self.store.run_id, named)
        found = known.get(key_hash) or await self.store.read(session_lookup.find_named, self.store.run_id, named)
        if found is None and opens:
            found = await named_sessions.open_named(self.store, named)
        if found is None:
            raise no_session(named)
        known[key_hash] = found
        return found

    async def _of_subagent(self, request: Request) -> str | None:
        """The session of the sub-agent that a call names; None where the URL or the key names another session.

        Raises RequestError: 401 for an unknown key, 404 for an unknown parent, 409 for a new name after the parent has
        ended, 400 for a name that is missing or too long.
        """
        parent_id = request.headers.get(PARENT_HEADER)
        in_url = request.path_params.get("session_id")
        if not parent_id or in_url not in (None, parent_id):
            return None
        caller = await self.access.authenticate(request)
        if caller.session_id not in (None, parent_id):
            return None  # the key belongs to another session: the call is for that one
        name = request.headers.get(named_sessions.HEADER, "")
        if name == parent_id:
            return None
        subagents.check_name(name)
        return await subagents.session_of(self.store, self.sessions.named, await self.resolve(request, parent_id), name)
