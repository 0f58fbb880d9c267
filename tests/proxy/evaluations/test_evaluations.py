"""Evaluations by a real worker during training: the training data stays as it is, and one version samples each."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from databases import KINDS
from sqlalchemy import Connection, select

from agentrl.console import Console
from agentrl.rollout.held_out import settings_of
from agentrl.rollout.worker import work
from agentrl.store import runs
from agentrl.store.audit import run_audit
from agentrl.store.db import codec
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    rewards,
    sessions,
    trajectories,
)
from agentrl.store.training import steps

from .evaluated_run import EVALUATION, STEPS, Run, config


async def play_and_train(run: Run, *, hold: bool = False) -> None:
    """A worker and a trainer, to the end of the run."""
    async with asyncio.TaskGroup() as parts:
        parts.create_task(asyncio.to_thread(run.train, STEPS, hold=hold))
        parts.create_task(
            work(
                run.config,
                settings_of(run.config),
                base_url=run.url,
                api_key="run-key",
                owner="me",
                console=Console(file=io.StringIO()),
            )
        )


def training_data(conn: Connection, run_id: str) -> tuple[Any, ...]:
    """All that is trained or counted, with nothing that time or chance names."""
    of_run = select(groups.c.cursor, groups.c.state, groups.c.size, sessions.c.sample_index, sessions.c.status)
    calls = conn.execute(
        of_run.add_columns(
            interactions.c.seq,
            interactions.c.params,
            interactions.c.prompt_digest,
            interactions.c.status,
            interactions.c.trainable,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.output_ids,
            interaction_data.c.logprobs,
            interaction_data.c.spans,
        )
        .join(sessions, sessions.c.group_id == groups.c.id)
        .join(interactions, interactions.c.session_id == sessions.c.id)
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(groups.c.run_id == run_id, groups.c.is_eval.is_(False))
        .order_by(groups.c.cursor, sessions.c.sample_index, interactions.c.seq)
    ).all()
    rewarded = conn.execute(
        select(groups.c.cursor, sessions.c.sample_index, rewards.c.value, rewards.c.applied)
        .join(sessions, sessions.c.group_id == groups.c.id)
        .join(rewards, rewards.c.session_id == sessions.c.id)
        .where(groups.c.is_eval.is_(False))
        .order_by(groups.c.cursor, sessions.c.sample_index)
    ).all()
    built = conn.execute(
        select(
            groups.c.cursor,
            sessions.c.sample_index,
            trajectories.c.state,
            trajectories.c.tokens,
            trajectories.c.trainable_tokens,
            trajectories.c.min_version,
            trajectories.c.max_version,
            trajectories.c["return"],
        )
        .join(groups, groups.c.id == trajectories.c.group_id)
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .order_by(groups.c.cursor, sessions.c.sample_index)
    ).all()
    lineage = [
        (
            s.step,
            s.state,
            s.version_before,
            s.version_after,
            s.groups,
            s.trajectories,
            s.tokens_trained,
            s.staleness_max,
            s.return_mean,
        )
        for s in steps.of_run(conn, run_id)
    ]
    run = runs.get(conn, run_id)
    counters = (run.admitted, run.returned, run.running, run.data_cursor, run.published_step, run.current_version)
    unpacked = [
        (
            *row[:-4],
            *(codec.unpack_ids(row[i]).tolist() for i in (-4, -3)),
            codec.unpack_logprobs(row[-2]).tolist(),
            row[-1],
        )
        for row in map(tuple, calls)
    ]
    return unpacked, [tuple(r) for r in rewarded], [tuple(r) for r in built], lineage, counters


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_evaluation_changes_nothing_in_the_training_data_or_the_admission_counters(
    start: Any, kind: str
) -> None:
    found = []
    for evaluation in (EVALUATION, {}):
        with start(config(**evaluation), kind) as run:
            await play_and_train(run)
            found.append(run.database.query(training_data, run.id))
            assert run.database.query(lambda conn: list(run_audit.scan(conn, run.id))) == []
            measured = [(one["step"], one["complete"], one["ended"]) for one in run.evaluations()]
            assert measured == ([(0, True, 6), (2, True, 6), (4, True, 6)] if evaluation else [])
    with_evaluation, without = found
    assert len(without[0]) == STEPS * 2 * 2 * 2  # groups, sessions, calls
    assert without[-1][:4] == (STEPS * 2, 0, 0, STEPS * 2)
    for ours, theirs in zip(with_evaluation, without, strict=True):
        assert ours == theirs


async def test_with_hold_one_version_samples_the_whole_evaluation(start: Any) -> None:
    with start(config(**EVALUATION, hold=True, max_concurrent=1)) as run:
        run.engine.token_delay_s = 0.005
        await play_and_train(run, hold=True)
        for one in run.evaluations():
            result = one["settings"]["cool"]
            assert (result["version_min"], result["version_max"]) == (one["version"], one["version"])
            assert (one["step"], one["complete"]) == (one["version"], True)
        sampled = {r["sampling_params"]["temperature"] for r in run.engine.requests}
        assert sampled == {0.5, 1.0}
