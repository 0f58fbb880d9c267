"""An engine as one replica of the proxy knows it, by its own calls and probes or by the engine's row in the store.

DEAD ─ it answers and has the wanted version ─► SERVING ◄────────────┐
  │                                               │ a publish        │
  └─ it answers with another version ─────────► UPDATING ─ updated ──┘
SERVING ─ the trainer takes its turn on their GPUs ─► RELEASED ─ the turn is over ─► UPDATING
any state ─ a call or a probe fails, or it stays silent ─► DEAD
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.engine.chunks import Adapter
from agentrl.engine.engine_client import EngineClient, Memory
from agentrl.store.engine_rows import Member

STEP_WEIGHT = 0.1
"""Weight of the newest observation in an engine's decode step."""


class EngineState(StrEnum):
    """The state of an engine; the store has the same words."""

    SERVING = "serving"
    UPDATING = "updating"  # alive, but paused or starting: it samples nothing now
    RELEASED = "released"  # alive and paused, without weights and KV cache: the trainer has its GPU's memory
    DEAD = "dead"


@dataclass(slots=True)
class Engine:
    """One engine of the pool."""

    client: EngineClient
    state: EngineState = EngineState.DEAD
    version: int | None = None
    label: int | None = None  # version of its full weights, as it reports it
    memory: Memory = Memory.HELD  # as it reported when this replica last asked
    adapter: Adapter | None = None  # the adapter that turns the base weights into `version`
    loaded: dict[str, str] = field(default_factory=dict)  # the adapters that it holds: name → folder
    folder: str | None = None  # the parent folder of the run's adapters
    replaced_at: dict[str, float] = field(default_factory=dict)  # adapter that new calls no longer use → since when
    running: int = 0  # calls that this process sent to it
    draining: bool = False  # it finishes its calls and gets no new ones
    joined: bool = False  # while the run goes on; it may leave
    own_key: bool = False  # it requires the key that is derived from the admin key
    left: bool = False  # it is no longer an engine of the run
    error: str | None = None
    row: Member | None = None  # the newest row of the store that this replica knows
    seen: int = 0  # `changes` when this replica last looked at the engine: what it saw replaces older rows only
    mine: bool = False  # this replica is one of its watchers
    followed: bool = False  # a task of this replica probes it
    unreached: bool = False  # our last call or probe did not reach it
    told: int | None = None  # `changes` of the row in which we told the others that we do not reach it
    told_at: float = 0.0  # when we did (monotonic)
    quiet_until: float = 0.0  # until then we do not tell them so again (monotonic)
    quiet_s: float = 0.0  # for how long, the last time
    quiet_for: str | None = None  # the replica that reached the engine when we did not
    telling: bool = False  # the state is being recorded in the store
    paused: bool = False  # by an update: calls that it gets now wait, and are then sampled
    unreleased: bool = False  # our claim on it has ended, but the store has not recorded that yet
    paused_since: float | None = None  # monotonic; None: not paused
    unanswered: int = 0  # unanswered probes in a row
    prepares: bool | None = None  # whether it can prepare versions; None: it was not asked since it started
    preparing_since: float | None = None  # monotonic: since when a probe of ours waits for its preparation
    newer: tuple[str, bool, float] | None = None  # a newer version that it prepares: name, is ready, since (monotonic)
    step_s: float | None = None  # a decode step, as calls of this process saw it lately
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it is probed or updated
    probe_due: asyncio.Event = field(default_factory=asyncio.Event)  # set to request a probe now

    def saw_steps(self, seconds: float) -> None:
        """A call saw decode steps of this length: `step_s` is their mean, in which late ones weigh more."""
        self.step_s = seconds if self.step_s is None else self.step_s + STEP_WEIGHT * (seconds - self.step_s)

    @property
    def changes(self) -> int:
        """`changes` of the newest row that this replica knows."""
        return 0 if self.row is None else self.row.changes

    def take(self, row: Member | None, *, written: bool) -> None:
        """Take a row of the store, which this replica has just written or read.

        One that it has written holds nothing newer than what it has seen of the engine.
        """
        if written and row is not None and row.changes == self.changes + 1 and self.seen == self.changes:
            self.seen = row.changes
        self.row = row

    @property
    def url(self) -> str:
        """The URL of the engine."""
        return self.client.url

    @property
    def backend(self) -> str:
        """The name of its backend."""
        return self.client.backend

    def is_of(self, row: Member) -> bool:
        """Whether the row is of the server that we connected to, not of one that has replaced it at its URL."""
        return row.own_key == self.own_key and row.backend in (None, self.backend)

    @property
    def is_released(self) -> bool:
        """Whether it reported that it has neither weights nor KV cache."""
        return self.memory is Memory.RELEASED
