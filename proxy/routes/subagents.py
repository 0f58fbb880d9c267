"""Sub-agents that name themselves: their sessions start with their first model call.

A call with `x-parent-session-id: PARENT` and `X-Session-ID: NAME` belongs to the sub-agent's session called NAME of
PARENT, opened by whichever call comes first. The caller has the run's key, or PARENT's own.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.routes import named_sessions
from agentrl.proxy.state import ProxyState
from agentrl.store.sessions import child_sessions, session_names


async def session_of_subagent(request: Request, state: ProxyState) -> str | None:
    """The session of the sub-agent that a call names; None where the URL or the key says another session already.

    Raises RequestError: 401 for an unknown key, 404 for an unknown PARENT, 409 for a name
    that is new after PARENT has ended, 400 for a name that is missing or too long.
    """
    parent_id = request.headers.get(authentication.PARENT_HEADER)
    in_url = request.path_params.get("session_id")
    if not parent_id or in_url not in (None, parent_id):
        return None
    caller = await authentication.authenticate(request, state)
    if caller.session_id not in (None, parent_id):
        return None  # the key of another session, which is named by it
    name = request.headers.get(named_sessions.HEADER, "")
    if name == parent_id:
        return None
    if not 0 < len(name) <= LONGEST_KEY:
        raise RequestError(
            400,
            f"{authentication.PARENT_HEADER} needs X-Session-ID, the sub-agent's name, "
            f"of at most {LONGEST_KEY} characters",
            code="invalid_parameter",
            param="X-Session-ID",
        )
    return await _session(state, await named_sessions.resolve(request, state, parent_id), name)


async def _session(state: ProxyState, parent_id: str, name: str) -> str:
    mark = _mark(parent_id, name)
    known = state.session_keys.get(mark)
    known = known or await state.read(session_names.find_child, state.run_id, parent_id, name, mark)
    if known is None:
        opened = await state.write(child_sessions.start_child, parent_id, state.limits, mark, {"name": name})
        known = opened.session_ids[0]
    state.session_keys[mark] = known
    return known


def _mark(parent_id: str, name: str) -> str:
    """What stands in place of a key's hash. It is another kind of hash than `hash_key`, so no key opens the session."""
    return hashlib.blake2b(f"{parent_id}\0{name}".encode(), digest_size=32, person=b"sub-agent").hexdigest()
