"""Tokens of trajectories that a rank has read before it knows that it trains them, bounded in bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from agentrl.domain.batches.outline import PathTokens


class TokenCache:
    """Trajectory → its tokens, at most `limit_bytes` of them. Safe to use from several threads.

    It drops nothing to make room: what was read first is most likely to be trained next.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._found: dict[str, PathTokens] = {}
        self._size = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the tokens."""
        return self._size

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._found

    def fits(self, size_bytes: int) -> bool:
        """Whether so many more bytes fit."""
        return self._size + size_bytes <= self.limit_bytes

    def add(self, trajectory_id: str, tokens: PathTokens) -> bool:
        """Keep the tokens of a trajectory; false when they do not fit."""
        with self._lock:
            if trajectory_id in self._found:
                return True
            if not self.fits(tokens.size_bytes):
                return False
            self._found[trajectory_id] = tokens
            self._size += tokens.size_bytes
            return True

    def take(self, trajectory_id: str) -> PathTokens | None:
        """The tokens of a trajectory, which the cache then no longer has."""
        with self._lock:
            tokens = self._found.pop(trajectory_id, None)
            self._size -= 0 if tokens is None else tokens.size_bytes
            return tokens

    def keep_only(self, trajectory_ids: Iterable[str]) -> None:
        """Drop all but these."""
        kept = set(trajectory_ids)
        for name in [name for name in list(self._found) if name not in kept]:
            self.take(name)
