"""Outlines say of trajectories what their arrays say, and a guess of the next batch is what a lease takes."""

from __future__ import annotations

import pytest
from history import History
from sqlalchemy import update

from agentrl.domain.batches.outline import joined
from agentrl.domain.batches.outline_message import pack, unpack
from agentrl.domain.batching import common_prefix
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions
from agentrl.store.training import steps
from agentrl.store.training.paths import next_batch, path_tokens


@pytest.fixture
def history(db: Database) -> History:
    """A run whose next batch has tokens of three versions, some of them too old."""
    made = History(db, seed=3)
    made.train(2)
    made.group(versions=[0, 1, 2])
    made.group(versions=[1, 2])
    return made


def test_an_outline_counts_what_the_arrays_hold(db: Database, history: History) -> None:
    batch = history.lease()
    assert batch is not None
    outline = db.query(steps.outlined, batch.step_id)
    assert (outline.step, outline.version, outline.ages) == (batch.step, batch.version, batch.ages)
    assert outline.wasted_tokens == batch.wasted_tokens > 0
    for one, t in zip(outline.trajectories, batch.trajectories, strict=True):
        for name in ("trajectory_id", "session_id", "episode_id", "group_id", "episode_return", "length"):
            assert getattr(one, name) == getattr(t, name)
        assert (one.computed_tokens, one.sampled_tokens) == (t.computed_tokens, t.sampled_tokens)
        assert one.turn_tokens.tolist() == t.turn_tokens.tolist()
        assert one.loss_tokens == t.loss_mask.sum()
        for other, u in zip(outline.trajectories, batch.trajectories, strict=True):
            assert one.shared(other) <= common_prefix(t.input_ids, u.input_ids)
    assert any(a.shared(b) for a in outline.trajectories for b in outline.trajectories if a is not b)  # forks


def test_ranks_read_a_batch_in_parts_and_get_the_same_arrays(db: Database, history: History) -> None:
    batch = history.lease()
    assert batch is not None
    outline = unpack(pack(db.query(steps.outlined, batch.step_id)))
    digests = []
    for one in outline.trajectories:
        tokens = db.query(path_tokens.read, {one.trajectory_id: one.calls})
        digests.append(joined(one, tokens[one.trajectory_id]).digest())
    assert digests == [t.digest() for t in batch.trajectories]


def test_the_guessed_batch_is_the_one_that_is_leased(db: Database, history: History) -> None:
    groups = db.query(next_batch.oldest, history.run_id, 2)
    guess = db.query(next_batch.read, history.run_id, groups, version=history.version, max_staleness=1)
    batch = history.lease()
    assert batch is not None
    leased = {t.trajectory_id for t in batch.trajectories if t.loss_mask.any()}
    assert leased <= {one.trajectory_id for of_group in guess.values() for one in of_group}
    assert groups == list(guess) == sorted({t.group_id for t in batch.trajectories})
    assert db.query(next_batch.oldest, history.run_id, 2) == []
    assert db.query(next_batch.read, history.run_id, groups, version=history.version, max_staleness=1) == {}


def test_tokens_that_are_not_where_the_outline_has_them_are_refused(db: Database, history: History) -> None:
    batch = history.lease()
    assert batch is not None
    call = db.query(steps.outlined, batch.step_id).trajectories[0].calls[0]
    with db.write() as conn:
        ids = codec.pack_ids([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
        conn.execute(
            update(interaction_data).where(interaction_data.c.interaction_id == call).values(prompt_delta_ids=ids)
        )
    with pytest.raises(ValueError, match="its outputs are at"):
        db.query(steps.batch, batch.step_id)


def test_a_call_without_a_logprob_for_each_token_is_refused(db: Database, history: History) -> None:
    batch = history.lease()
    assert batch is not None
    call = db.query(steps.outlined, batch.step_id).trajectories[0].calls[0]
    with db.write() as conn:
        of_call = interaction_data.c.interaction_id == call
        conn.execute(update(interaction_data).where(of_call).values(logprobs=codec.pack_logprobs([-1.0])))
        conn.execute(update(interactions).where(interactions.c.id == call).values(cached_tokens=0))
    with pytest.raises(ValueError, match="1 logprobs for"):
        db.query(steps.batch, batch.step_id)


def test_chunks_bound_the_tokens_that_are_read_at_once() -> None:
    lengths = {"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}
    assert list(path_tokens.chunks(lengths, 6)) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(path_tokens.chunks({}, 6)) == []
