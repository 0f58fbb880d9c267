"""Sessions that a client names: one endpoint and the run's key for many rollouts.

With `proxy.named_sessions` a model call with a run or admin key and an `X-Session-ID` that is not known opens a session
of that name; whichever of many first calls comes first, at whichever replica, there is one. It takes a place of the run
as every start does. Wherever an id is expected, that name is one then.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from agentrl.errors import RequestError
from agentrl.proxy.access import authentication
from agentrl.proxy.access.authentication import Power
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.routes.admission import admitted
from agentrl.proxy.state import ProxyState
from agentrl.store.sessions import group_starts, session_names

HEADER = "x-session-id"
DONE_HEADER = "x-session-done"


async def resolve(request: Request, state: ProxyState, named: str, *, opens: bool = False) -> str:
    """The id of the session that a caller means. `opens`: a name that is new opens a session.

    Raises RequestError: 401 and 403 for the key, 404 for a session that is not known, 400 for what cannot be a name,
    429 while admission refuses.
    """
    caller = await authentication.authenticate(request, state)
    if caller.power is Power.SESSION or not state.named_sessions:
        await authentication.session_caller(request, state, named)
        return named
    mark = _mark(state.run_id, named)
    known = state.session_keys.get(mark) or await state.read(session_names.find, state.run_id, named)
    if known is None and opens:
        known = await _open(state, named, mark)
    if known is None:
        raise RequestError(404, f"no session {named!r}", code="session_not_found")
    state.session_keys[mark] = known
    return known


def is_done(request: Request) -> bool:
    """Whether a call says that its session is over with it. Raises RequestError 400."""
    said = request.headers.get(DONE_HEADER, "").strip().lower()
    if said not in ("", "0", "false", "1", "true"):
        raise RequestError(
            400, f"X-Session-Done: true or false, got {said[:20]!r}", code="invalid_parameter", param="X-Session-Done"
        )
    return said in ("1", "true")


async def _open(state: ProxyState, name: str, mark: str) -> str:
    if not (0 < len(name) <= LONGEST_KEY and name.isprintable()):
        raise RequestError(
            400,
            f"a session's name has 1 to {LONGEST_KEY} printable characters",
            code="invalid_parameter",
            param="X-Session-ID",
        )
    group = await admitted(
        state, group_starts.start_external, [mark], None, {}, outside=True, start_digest=mark[:32], name=name
    )
    return group.session_ids[0]


def _mark(run_id: str, name: str) -> str:
    """What stands in place of a key's hash. It is another kind of hash than `hash_key`, so no key opens the session."""
    return hashlib.blake2b(f"{run_id}\0{name}".encode(), digest_size=32, person=b"named").hexdigest()
