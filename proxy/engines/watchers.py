"""Which replicas watch an engine: a few of the live ones, chosen by rendezvous hashing.

Every replica gives each pair of an engine and a replica the same score; the replicas with the highest scores watch the
engine. When a replica dies, only its engines get another watcher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

FIRST_BEAT_S = 4.0
"""A replica that was not heard before is dead if its heartbeat does not change for this time: two heartbeats."""
LONGEST_STEP_S = 2.0
"""Silence counts at most this long per read, so that an outage of the database makes no replica look dead."""


class LiveReplicas:
    """The replicas whose heartbeats go on.

    A replica is dead when its heartbeat has not changed for `silent_s` of this replica's time, during which the store
    was read. No clocks of two machines are compared.
    """

    def __init__(self, me: str, silent_s: float) -> None:
        self._me = me
        self._silent_s = silent_s
        self._time = self._read_at = 0.0
        self._heard: dict[str, tuple[float, float]] = {}  # name → its last heartbeat, and our time when it was new

    def read(self, heartbeats: Mapping[str, float], now: float) -> frozenset[str]:
        """The live replicas, this one among them, after a read of the heartbeats at `now` (monotonic)."""
        self._time += min(now - self._read_at, LONGEST_STEP_S)
        self._read_at = now
        before, self._heard = self._heard, {}
        for name, beat in heartbeats.items():
            known = before.get(name)
            if known is None:  # it may have died before this replica started
                self._heard[name] = (beat, self._time - max(0.0, self._silent_s - FIRST_BEAT_S))
            else:
                self._heard[name] = known if known[0] == beat else (beat, self._time)
        alive = {name for name, (_, since) in self._heard.items() if self._time - since <= self._silent_s}
        return frozenset(alive | {self._me})


def watched_by(me: str, urls: Sequence[str], replicas: Iterable[str], count: int) -> set[str]:
    """The engines that `me` watches; each engine has `count` watchers."""
    names = sorted({me, *replicas})
    if len(names) <= count:
        return set(urls)
    scores_ER = _mixed(_hashes(urls)[:, None] ^ _hashes(names)[None, :])  # engines × replicas
    mine_E1 = scores_ER[:, names.index(me), None]
    ahead_E = (scores_ER > mine_E1).sum(axis=1)
    return {url for url, ahead in zip(urls, ahead_E.tolist(), strict=True) if ahead < count}


def list_digest(urls: Iterable[str]) -> str:
    """A digest of a list of engines: replicas that were started with the same list divide it among themselves."""
    return hashlib.blake2b("\n".join(sorted(urls)).encode(), digest_size=8).hexdigest()


def _hashes(names: Sequence[str]) -> npt.NDArray[np.uint64]:
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, np.uint64)


def _mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64: each bit of a result depends on every bit of its input."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
