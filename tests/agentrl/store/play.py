"""Performs what the proxy and the trainer do to the store (calls, groups, steps), and a clock that tests set."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection

import agentrl.store
from agentrl.domain.schemas import Batch, InteractionStatus, SessionStatus, TrainedBatch, TrainedTrajectory, VersionSpan
from agentrl.domain.tokens import TokenIds
from agentrl.store import Database
from agentrl.store.calls import call_intents, call_outcomes, call_tree
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.training import rewards, steps, trainer_epochs, version_states

DELTA = (1, 2)
OUTPUT = (3, 4)
TIMEOUT_S = 90.0  # longer than a fault is waited for


class Clock:
    """Stands in for the module `time` inside the store: it moves when a test moves it."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Every module of the store that reads the time reads this clock; the database's own waits stay real."""
        for found in pkgutil.walk_packages(agentrl.store.__path__, "agentrl.store."):
            module = importlib.import_module(found.name)
            if getattr(module, "time", None) is time and not found.name.startswith("agentrl.store.db."):
                patch.setattr(module, "time", self)


def begin_call(
    conn: Connection,
    run_id: str,
    session_id: str,
    *,
    parent: str | None = None,
    delta: Sequence[int] = DELTA,
    role: str = "main",
    trainable: bool = True,
    replica: str = "r",
    tools: list[dict] | None = None,
    temperature: float = 1.0,
) -> str:
    """Write an intent row, its prompt bridged from the parent's tokens; returns the call's id."""
    call_id = codec.new_id()
    before = next((n.ids for n in call_tree.load_tree(conn, session_id)[1] if n.id == parent), TokenIds())
    ids = before.extended(delta)
    call_intents.begin(
        conn,
        call_intents.Intent(
            id=call_id,
            run_id=run_id,
            session_id=session_id,
            parent_id=parent,
            dialect="openai.chat",
            role=role,
            digest="d",
            replica=replica,
            params={},
            temperature=temperature,
            tools=codec.Content.of(tools) if tools else None,
            fork_reason=None,
            bridged=parent is not None,
            distribution_modified=False,
            trainable=trainable,
            prompt_tokens=len(ids),
            prompt_digest=ids.digest,
            created_at=call_outcomes.time.time(),
        ),
    )
    return call_id


def outcome(
    *,
    delta: Sequence[int] = DELTA,
    output: Sequence[int] = OUTPUT,
    version: int = 0,
    spans: Sequence[VersionSpan] | None = None,
    key: bytes = b"k",
    status: InteractionStatus = InteractionStatus.COMPLETE,
) -> call_outcomes.Outcome:
    """What a call sampled, by default all of it by `version`."""
    return call_outcomes.Outcome(
        status=status,
        conversation_key=key,
        new_messages=[],
        answer={},
        prompt_delta_ids=list(delta),
        output_ids=list(output),
        logprobs=[-0.5] * len(output),
        spans=list(spans or [VersionSpan(version=version, start=0, end=len(output))]),
        finish_reason="stop",
        engine_url="e",
        cached_tokens=0,
        first_token_at=None,
    )


def call(
    conn: Connection,
    run_id: str,
    session_id: str,
    *,
    parent: str | None = None,
    delta: Sequence[int] = DELTA,
    output: Sequence[int] = OUTPUT,
    version: int = 0,
    spans: Sequence[VersionSpan] | None = None,
    key: bytes = b"k",
    role: str = "main",
    trainable: bool = True,
    temperature: float = 1.0,
) -> str:
    """One recorded call; returns its id."""
    call_id = begin_call(
        conn,
        run_id,
        session_id,
        parent=parent,
        delta=delta,
        role=role,
        trainable=trainable,
        temperature=temperature,
    )
    call_outcomes.finish(
        conn, call_id, session_id, outcome(delta=delta, output=output, version=version, spans=spans, key=key)
    )
    return call_id


def open_group(db: Database, run_id: str, limits: Limits, size: int = 2) -> NewGroup:
    """A group of open sessions without calls."""
    with db.write() as conn:
        return group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(size)])


def end(db: Database, session_id: str, limits: Limits, status: SessionStatus = SessionStatus.COMPLETED) -> str:
    """End a session."""
    with db.write() as conn:
        return sealing.end(conn, session_id, status, None, limits)


def group(
    db: Database, run_id: str, limits: Limits, *, version: int = 0, values: Sequence[float] = (0.0, 1.0)
) -> NewGroup:
    """A whole rewarded group, two bridged calls a session."""
    with db.write() as conn:
        new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in values])
        for session_id, value in zip(new.session_ids, values, strict=True):
            first = call(conn, run_id, session_id, version=version)
            call(conn, run_id, session_id, parent=first, delta=(5,), output=(6, 7, 8), version=version)
            rewards.add(conn, session_id, value=value, discount=1.0)
            sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)
    return new


def take(db: Database, run_id: str, epoch: int, step: int, **kwargs: object) -> Batch | None:
    """Lease two groups and read the batch."""
    asked: dict = {"n_groups": 2, "max_staleness": 1, "discount": 1.0} | kwargs
    with db.write() as conn:
        step_id = steps.lease(conn, run_id, epoch, step=step, **asked)
        return None if step_id is None else steps.batch(conn, step_id)


def facts(batch: Batch) -> TrainedBatch:
    """What a trainer would report of a batch: a trajectory that has tokens in the loss was trained."""
    trained = []
    for t in batch.trajectories:
        ages = [batch.ages[version] for version in t.versions[t.loss_mask].tolist()]
        if ages:
            trained.append(
                TrainedTrajectory(
                    trajectory_id=t.trajectory_id,
                    advantage=1.0,
                    staleness_max=max(ages),
                    staleness_mean=sum(ages) / len(ages),
                    tokens_trained=len(ages),
                )
            )
    return TrainedBatch(
        step_id=batch.step_id,
        digest=batch.digest(),
        estimator="grpo",
        wasted_tokens=batch.wasted_tokens,
        trained=trained,
    )


def finish(db: Database, run_id: str, epoch: int, batch: Batch, *, publish: bool = True) -> int:
    """Complete a step, and publish its version; returns the version."""
    with db.write() as conn:
        version = version_states.next_version(conn, run_id)
        steps.complete(
            conn, run_id, epoch, facts(batch), metrics={"loss": 0.1}, version=version, path="p", checksum="c"
        )
        if publish:
            version_states.mark_published(conn, run_id, version)
    return version


def begin(db: Database, run_id: str) -> int:
    """A new trainer's epoch."""
    with db.write() as conn:
        return trainer_epochs.begin_epoch(conn, run_id)


@contextmanager
def held(db: Database) -> Iterator[None]:
    """The writer is busy until the block ends, so what is submitted meanwhile waits together."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(_: Connection) -> None:
        begun.set()
        assert go_on.wait(TIMEOUT_S)

    busy = db.submit(wait)
    assert begun.wait(TIMEOUT_S)
    try:
        yield
    finally:
        go_on.set()
    busy.result(TIMEOUT_S)
