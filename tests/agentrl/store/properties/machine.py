"""What every rule of the property test uses: the store, its model, and the trainer process of the moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from play import Clock
from sqlalchemy import Connection

from agentrl.domain.schemas import Batch, TrainedBatch
from agentrl.errors import RequestError, StoreError
from agentrl.store import Database
from agentrl.store.sessions.session_limits import Limits

from .model import Model
from .records import Session

LIMITS = Limits(
    group_size=2,
    min_group_size=1,
    max_concurrent_groups=4,
    max_staleness=1,
    groups_per_step=1,
    turn_discount=0.5,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=5000.0,
    heartbeat_timeout_s=60.0,
    max_subagent_depth=2,
    max_subagents_per_session=3,
)
TARGET_STEPS = 12
picks = st.integers(0, 63)  # which of those there are, counted from the newest


@dataclass
class Trainer:
    """A trainer process: what it holds in memory."""

    epoch: int
    step: int
    batch: Batch | None = None  # leased, not completed
    unpublished: int | None = None


@dataclass
class Checkpoint:
    """What a checkpoint names: the step, and what completing it takes."""

    step_id: str
    record: TrainedBatch


def error_code(error: Exception) -> str:
    assert isinstance(error, RequestError), error
    return error.code


class Machine(RuleBasedStateMachine):
    """One run, its model, and one trainer at a time; `db` and `clock` are shared by the examples of a test."""

    db: Database
    clock: Clock
    run_id: str
    model: Model
    trainer: Trainer | None
    checkpoints: list[Checkpoint]

    def _try(self, unit: Callable[[Connection], Any]) -> Any:
        """What a transaction returns, or the error that refused it."""
        try:
            with self.db.write() as conn:
                return unit(conn)
        except (RequestError, StoreError) as error:
            return error

    def _session(self, pick: int) -> Session:
        there = self.model.sessions
        return there[-1 - pick % len(there)]
