"""An engine as one replica of the proxy knows it.

DEAD ─ it answers and has the wanted version ─► SERVING ◄────────────┐
  │                                               │ a publish        │
  └─ it answers with another version ─────────► UPDATING ─ updated ──┘
any state ─ a call or a probe fails, or it stays silent ─► DEAD
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.engine.sglang_client import Adapter, EngineClient


class EngineState(StrEnum):
    """The state of an engine; the store has the same words."""

    SERVING = "serving"
    UPDATING = "updating"  # alive, but paused or starting: it samples nothing now
    DEAD = "dead"


@dataclass(slots=True)
class Engine:
    """One engine of the pool."""

    client: EngineClient
    state: EngineState = EngineState.DEAD
    version: int | None = None
    label: int | None = None  # of its whole weights, as it reports it
    adapter: Adapter | None = None  # the adapter that turns the base weights into `version`
    loaded: dict[str, str] = field(default_factory=dict)  # the adapters that it holds: name → folder
    folder: str | None = None  # of the run's adapters
    replaced_at: dict[str, float] = field(default_factory=dict)  # adapter that new calls no longer use → since when
    running: int = 0  # calls that this process sent to it
    draining: bool = False  # it finishes its calls and gets no new ones
    error: str | None = None
    last_seen_at: float = 0.0
    paused: bool = False  # by an update: calls that it gets now wait, and are then sampled
    unreturned: bool = False  # our turn to update it is over, which the store does not know yet
    paused_since: float | None = None  # monotonic; None: not paused
    reported: bool = False  # the store has its state and version
    unanswered: int = 0  # how many probes in a row
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is probed or updated
    probe_due: asyncio.Event = field(default_factory=asyncio.Event)  # probe it now

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url
