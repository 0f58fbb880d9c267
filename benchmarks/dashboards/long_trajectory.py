"""A run with one trained trajectory of many tokens, each with all facts that a trainer measures."""

from __future__ import annotations

import numpy as np
from recorded_calls import record_call

from agentrl.domain.schemas import (
    FACTS,
    MASKED_FACTS,
    SessionStatus,
    TokenFacts,
    TrainedBatch,
    TrainedTrajectory,
)
from agentrl.store import Connection, Database, runs
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.training import rewards, steps, token_facts, trainer_epochs, version_states

LIMITS = Limits(
    group_size=1,
    min_group_size=1,
    max_concurrent_groups=10,
    max_staleness=10,
    groups_per_step=1,
    turn_discount=1.0,
    reward_timeout_s=0.0,
    end_grace_s=30.0,
    session_timeout_s=900.0,
    session_max_s=86400.0,
    heartbeat_timeout_s=60.0,
)
PROMPT = 16


def filled(database: Database, tokens: int, base_model: str = "tiny", vocabulary: int = 40_000) -> str:
    """Create the run `long`; returns the id of its session, whose trajectory has this many tokens."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, vocabulary, tokens)
    config = {"name": "long", "model": "tiny", "agent": "a:b", "tasks": "a:c", "rollout": {"group_size": 1}}
    with database.write() as conn:
        run_id = runs.create(
            conn, name="long", config=config, task_data=[{}], base_model=base_model, key="run-key", seed=0, steps=10
        )
        epoch = trainer_epochs.begin_epoch(conn, run_id)
        (session_id,) = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id()]).session_ids
        _call(conn, run_id, session_id, ids[:PROMPT].tolist(), ids[PROMPT:].tolist())
        rewards.add(conn, session_id, value=1.0, discount=1.0)
        sealing.end(conn, session_id, SessionStatus.COMPLETED, None, LIMITS)
        step_id = steps.lease(conn, run_id, epoch, step=1, n_groups=1, max_staleness=10, discount=1.0)
        assert step_id is not None
        (path,) = steps.batch(conn, step_id).trajectories
        trained = int(path.loss_mask.sum())
        facts = TokenFacts(
            rng.random((len(FACTS), trained), np.float32),
            rng.random((len(MASKED_FACTS), int(path.masked_outputs.sum())), np.float32),
        )
        token_facts.record(conn, run_id, epoch, step_id, {path.trajectory_id: facts})
        of_path = TrainedTrajectory(
            trajectory_id=path.trajectory_id, advantage=1.0, staleness_max=0, staleness_mean=0.0, tokens_trained=trained
        )
        batch = TrainedBatch(step_id=step_id, digest="d", estimator="grpo", wasted_tokens=0, trained=[of_path])
        version = version_states.next_version(conn, run_id)
        steps.complete(conn, run_id, epoch, batch, metrics={"loss": 0.1}, version=version, path="p", checksum="c")
    return session_id


def _call(conn: Connection, run_id: str, session_id: str, prompt: list[int], output: list[int]) -> None:
    """One call that samples all of it."""
    logprobs = (-np.random.default_rng(1).random(len(output))).tolist()
    record_call(conn, run_id, session_id, prompt=prompt, delta=prompt, output=output, logprobs=logprobs)
