"""Sub-agents that name themselves: their sessions start with their first model call.

A call with `x-parent-session-id: PARENT` and `X-Session-ID: NAME` belongs to the session of PARENT's sub-agent NAME,
which the first such call opens. The caller has the run's key, or PARENT's own.
"""

from __future__ import annotations

import hashlib

from agentrl.errors import bad_parameter
from agentrl.proxy.access.authentication import PARENT_HEADER
from agentrl.proxy.access.request_bounds import LONGEST_KEY
from agentrl.proxy.recent import Recent
from agentrl.proxy.run_store import RunStore
from agentrl.store.sessions import child_sessions, session_lookup


def check_name(name: str) -> None:
    """Raises RequestError 400 for a sub-agent's name that is missing or too long."""
    if not 0 < len(name) <= LONGEST_KEY:
        raise bad_parameter(
            "X-Session-ID",
            f"{PARENT_HEADER} needs X-Session-ID, the sub-agent's name, of at most {LONGEST_KEY} characters",
        )


async def session_of(store: RunStore, known: Recent[str], parent_id: str, name: str) -> str:
    """The session of a parent's sub-agent, opened if it is new; kept in `known`.

    Raises RequestError 409 for a new name after the parent has ended.
    """
    key_hash = _key_hash_of(parent_id, name)
    found = known.get(key_hash)
    found = found or await store.read(session_lookup.find_child, store.run_id, parent_id, name, key_hash)
    if found is None:
        opened = await store.write(child_sessions.start_child, parent_id, store.limits, key_hash, {"name": name})
        found = opened.session_ids[0]
    known[key_hash] = found
    return found


def _key_hash_of(parent_id: str, name: str) -> str:
    """The value that the store holds in place of a key's hash. No key matches it, as `hash_key` hashes differently."""
    return hashlib.blake2b(f"{parent_id}\0{name}".encode(), digest_size=32, person=b"sub-agent").hexdigest()
