"""An engine as one replica of the proxy knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.engine.sglang_client import Adapter, EngineClient


class EngineState(StrEnum):
    """What the pool believes of an engine; the same words as in the store."""

    SERVING = "serving"
    UPDATING = "updating"  # alive, holds its calls back
    DEAD = "dead"


@dataclass(slots=True)
class Engine:
    """One engine of the pool."""

    client: EngineClient
    state: EngineState = EngineState.DEAD
    version: int | None = None
    label: int | None = None  # of its whole weights, as it reports them
    adapter: Adapter | None = None  # what makes base weights that version
    loaded: dict[str, str] = field(default_factory=dict)  # adapters that it has: name → folder
    folder: str | None = None  # that the run's adapters are in
    replaced_at: dict[str, float] = field(default_factory=dict)  # adapters that new calls no longer get, since when
    running: int = 0  # calls of ours
    draining: bool = False  # finishes what it has
    error: str | None = None
    last_seen_at: float = 0.0
    holds: bool = False  # it is paused: calls that it gets now wait
    kept: bool = False  # it could not be given back
    paused_since: float | None = None  # monotonic; None: not paused
    reported: bool = False  # the store knows of its state and version
    unanswered: int = 0  # probes in a row
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by who asks it or changes its weights
    look: asyncio.Event = field(default_factory=asyncio.Event)  # probe it now

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.client.url
