"""Sessions that a client names: one base URL and the run's key serve many rollouts.

With `proxy.named_sessions`, a model call with a run or admin key and an unknown `X-Session-ID` opens a session of that
name. Of many first calls, at any replica, only one opens it. It is admitted like every other session. Wherever a route
takes a session's id, it takes the name too.
"""

from __future__ import annotations

import hashlib

from starlette.requests import Request

from agentrl.errors import bad_parameter
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.run_store import RunStore
from agentrl.proxy.sessions.admission import admitted
from agentrl.store.sessions import group_starts

HEADER = "x-session-id"
DONE_HEADER = "x-session-done"


def key_hash_of(run_id: str, name: str) -> str:
    """The value that the store holds in place of a key's hash. No key matches it, as `hash_key` hashes differently."""
    return hashlib.blake2b(f"{run_id}\0{name}".encode(), digest_size=32, person=b"named").hexdigest()


async def open_named(store: RunStore, name: str) -> str:
    """Open the session of this name, or find the one that another call has just opened; its id.

    Raises RequestError: 400 for a name that cannot be stored, 429 while admission refuses.
    """
    if not (0 < len(name) <= LONGEST_KEY and name.isprintable()):
        raise bad_parameter("X-Session-ID", f"a session's name has 1 to {LONGEST_KEY} printable characters")
    key_hash = key_hash_of(store.run_id, name)
    group = await admitted(
        store, group_starts.start_external, [key_hash], None, {}, outside=True, start_digest=key_hash[:32], name=name
    )
    return group.session_ids[0]


def is_done(request: Request) -> bool:
    """Whether a call says that it is the last one of its session. Raises RequestError 400."""
    said = request.headers.get(DONE_HEADER, "").strip().lower()
    if said not in ("", "0", "false", "1", "true"):
        raise bad_parameter("X-Session-Done", f"X-Session-Done: true or false, got {said[:20]!r}")
    return said in ("1", "true")
