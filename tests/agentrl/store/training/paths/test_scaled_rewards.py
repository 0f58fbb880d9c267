"""Rewards of batches are scaled by the statistics of the batches before, and the recorded ones stay."""

from __future__ import annotations

import numpy as np
import pytest
from history import History
from sqlalchemy import Connection, select, update

from agentrl.domain.batches.reward_scaling import RewardScaling, Scale
from agentrl.domain.credit import SessionRewards
from agentrl.domain.schemas import Batch
from agentrl.store import Database
from agentrl.store.tables import groups, interactions, rewards, steps, tasks
from agentrl.store.tables import trajectories as paths
from agentrl.store.training import batch_facts
from agentrl.store.training import steps as training_steps

pytestmark = pytest.mark.long_on("postgresql")


@pytest.fixture
def history(db: Database) -> History:
    return History(db, seed=3)


@pytest.fixture
def scaled(history: History) -> History:
    history.scales = {"reward": Scale(normalize="running", clip=(-1.0, 1.0)), "turn": Scale(clip=(0.2, 0.4))}
    return history


def recorded(history: History, batch: Batch, name: str) -> list[float]:
    """The values of one name of a batch's sessions, in the order of sessions."""
    with history.db.read() as conn:
        ids = sorted({t.session_id for t in batch.trajectories})
        rows = conn.execute(select(rewards).where(rewards.c.session_id.in_(ids), rewards.c.name == name))
        of = {row.session_id: row.value for row in rows}
    return [of[one] for one in ids]


def test_a_batch_is_normalised_by_all_batches_until_it(scaled: History) -> None:
    seen: list[float] = []
    for _ in range(3):
        scaled.train()
        batch = scaled.batches[scaled.step]
        values = recorded(scaled, batch, "reward")
        seen += values
        z = np.clip((np.array(values) - np.mean(seen)) / (np.std(seen) + 1e-6), -1, 1)
        found = {t.session_id: t.named_returns for t in batch.trajectories}
        discounts = {t.session_id: t for t in batch.trajectories}
        for i, session_id in enumerate(sorted(found)):
            turns = scaled.db.query(_main_calls, session_id)
            assert found[session_id]["reward"] == pytest.approx(z[i] * 0.9 ** (turns - 1), abs=1e-6)
            assert discounts[session_id].episode_return == pytest.approx(sum(found[session_id].values()), abs=1e-9)


def _main_calls(conn: Connection, session_id: str) -> int:
    of = select(interactions).where(interactions.c.session_id == session_id, interactions.c.role == "main")
    return len(conn.execute(of).all())


def test_replay_gives_the_same_numbers_and_recorded_ones_stay(scaled: History) -> None:
    scaled.train(2)
    for step, batch in scaled.batches.items():
        again = scaled.db.query(training_steps.batch, batch.step_id)
        assert again.digest() == batch.digest(), step
    with scaled.db.read() as conn:
        raw = {row.session_id: row._mapping["return"] for row in conn.execute(select(paths))}
    trained = {t.session_id: t.episode_return for t in scaled.batches[1].trajectories}
    assert any(abs(raw[one] - trained[one]) > 1e-3 for one in trained)


def test_rolled_back_steps_do_not_count(scaled: History) -> None:
    scaled.train(3)
    last = scaled.batches[3]
    with scaled.db.read() as conn:
        before = conn.execute(select(steps.c.reward_scaling).where(steps.c.id == last.step_id)).scalar_one()
    scaled.go_back(2)
    scaled.train()
    again = scaled.batches[3]
    assert again.step_id != last.step_id
    assert {t.trajectory_id for t in again.trajectories} == {t.trajectory_id for t in last.trajectories}
    with scaled.db.read() as conn:
        after = conn.execute(select(steps.c.reward_scaling).where(steps.c.id == again.step_id)).scalar_one()
    assert after == before
    assert [t.episode_return for t in again.trajectories] == [t.episode_return for t in last.trajectories]


def test_a_refused_batch_does_not_count(scaled: History) -> None:
    for _ in range(3):
        scaled.group()
    batch = scaled.lease()
    assert batch is not None
    with scaled.db.write() as conn:
        refused = batch.trajectories[0].group_id
        training_steps.refuse(conn, scaled.run_id, scaled.epoch, batch.step_id, {refused: "no"})
    again = scaled.lease()
    assert again is not None
    with scaled.db.read() as conn:
        kept = RewardScaling.from_json(
            conn.execute(select(steps.c.reward_scaling).where(steps.c.id == again.step_id)).scalar_one()
        )
    values = recorded(scaled, again, "reward")
    assert kept.of_names()["reward"].mean == pytest.approx(np.mean(values), abs=1e-9)
    assert kept.of_names()["reward"].n == len(values)


def test_statistics_of_sources_are_apart(scaled: History) -> None:
    scaled.scales = {"reward": Scale(normalize="running_per_source")}
    for _ in range(2):
        scaled.group()
    with scaled.db.write() as conn:
        ids = list(conn.execute(select(groups.c.task_id).order_by(groups.c.id)).scalars())
        for name, task_id in zip("ab", ids, strict=True):
            conn.execute(update(tasks).where(tasks.c.id == task_id).values(data={"source": name}))
    batch = scaled.lease()
    assert batch is not None
    values = dict(
        zip(sorted({t.session_id for t in batch.trajectories}), recorded(scaled, batch, "reward"), strict=True)
    )
    group_of = {t.session_id: t.group_id for t in batch.trajectories}
    found = {t.session_id: t.named_returns["reward"] for t in batch.trajectories}
    for session_id, value in values.items():
        own = [v for other, v in values.items() if group_of[other] == group_of[session_id]]
        turns = scaled.db.query(_main_calls, session_id)
        z = (value - np.mean(own)) / (np.std(own) + 1e-6)
        assert found[session_id] == pytest.approx(z * 0.9 ** (turns - 1), abs=1e-6)
    facts = scaled.db.query(batch_facts.read, batch.step_id)
    assert facts.moments["reward"].mean == pytest.approx(np.mean(list(values.values())), abs=1e-9)
    assert sorted(facts.rewards["reward"]) == pytest.approx(sorted(values.values()))


def test_a_judge_of_a_replay_gets_the_trained_rewards(scaled: History) -> None:
    scaled.train()
    batch = scaled.batches[1]
    given: dict[str, SessionRewards] = {}

    def rescore(session_id: str, known: SessionRewards) -> SessionRewards:
        given[session_id] = known
        return SessionRewards(session=3.0)

    again = scaled.db.query(training_steps.batch, batch.step_id, discount=1.0, rescore=rescore)
    assert {t.episode_return for t in again.trajectories} == {3.0}
    assert all(0.2 <= own <= 0.4 for one in given.values() for own in one.named["turn"].calls.values())


def test_without_scales_nothing_is_stored(history: History) -> None:
    history.train()
    with history.db.read() as conn:
        assert conn.execute(select(steps.c.reward_scaling)).scalars().all() == [None]
