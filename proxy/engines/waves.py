"""Which engines change their weights now, so that a share of them always takes calls. Pure: no clock and no requests.

    needs NOW, IDLE or nothing ─ chosen by `next_wave` ─► changing ─ it has the version ─► needs nothing

`next_wave` is called again whenever an engine's entry changes. It holds, for every order of the entries:

1. At least `serving_share` of the engines that are in service keep taking calls. With so few engines that the share
   allows none to change, one changes at a time.
2. An engine out of service (dead, starting, or without its memory) may always change: no call waits for it.
3. At most `parallel` engines read their weights from files while they are paused. Prepared engines are not counted:
   their weights are in memory already.
4. An engine that may keep its version for now (`Need.IDLE`) changes when no call runs on it. If no engine has the
   version yet, or is about to have it, the one with the fewest calls changes: new sessions then have a place where they
   are not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Need(Enum):
    """Whether an engine has to change its weights."""

    NOTHING = "nothing"  # it has the version, or cannot change yet
    IDLE = "idle"  # when it has no calls
    NOW = "now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An engine, as one replica sees it."""

    url: str
    need: Need
    in_service: bool = True  # it takes calls, or took them until its change began
    changing: bool = False  # it is paused, and its weights change
    prepared: bool = False  # the version is in its memory, beside the one that serves
    current: bool = False  # it has the version
    running: int = 0  # calls


def spare(in_service: int, serving_share: float) -> int:
    """How many of the engines in service may change at once."""
    keeps = math.ceil(in_service * serving_share - 1e-9)
    return max(1, in_service - keeps)


def next_wave(candidates: Iterable[Candidate], *, serving_share: float, parallel: int) -> list[str]:
    """The URLs of the engines that begin to change now, those with the fewest calls first."""
    engines = list(candidates)
    places = spare(sum(engine.in_service for engine in engines), serving_share)
    places -= sum(engine.in_service and engine.changing for engine in engines)
    loads = parallel - sum(engine.changing and not engine.prepared for engine in engines)
    wave = []
    for engine in sorted(_ready(engines), key=lambda engine: (engine.running, engine.url)):
        needs_load = not engine.prepared
        if (engine.in_service and places <= 0) or (needs_load and loads <= 0):
            continue
        places -= engine.in_service
        loads -= needs_load
        wave.append(engine.url)
    return wave


def _ready(engines: list[Candidate]) -> list[Candidate]:
    """The engines that may change now, whatever the others do: invariant 4."""
    waiting = [engine for engine in engines if engine.need is Need.IDLE and not engine.changing]
    ready = [engine for engine in engines if engine.need is Need.NOW and not engine.changing]
    idle = [engine for engine in waiting if not engine.running or not engine.in_service]
    if idle or ready or not waiting or any(engine.current or engine.changing for engine in engines):
        return ready + idle
    return [min(waiting, key=lambda engine: (engine.running, engine.url))]
