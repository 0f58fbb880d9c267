"""Errors on AReaL's routes have AReaL's field `detail` in addition to this proxy's fields."""

from __future__ import annotations

import orjson

PATHS = frozenset({"/grant_capacity", "/rl/start_session", "/rl/set_reward", "/rl/end_session", "/export_trajectories"})


def with_detail(body: bytes) -> bytes:
    """The body of an error, with AReaL's `detail` added."""
    error = orjson.loads(body)
    return orjson.dumps({"detail": error["error"]["message"], **error})
