"""A fault of each kind is found from the first page in at most three clicks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from history import LIMITS, History, made_up_facts
from sqlalchemy import insert, update

from agentrl.domain.evaluation import Episode, Label
from agentrl.domain.schemas import ForkReason, InteractionStatus, SessionStatus
from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.tables import engines, interaction_data, interactions, rewards, sessions, steps
from agentrl.store.training import token_facts

from .visitor import Visitor

pytestmark = pytest.mark.long_on("postgresql")  # the views' own tests run on both
MOST_CLICKS = 3


@pytest.fixture
def history(db: Database) -> History:
    """A healthy run of two steps."""
    made = History(db, seed=7)
    made.train(2)
    return made


@pytest.fixture
def page(history: History) -> Visitor:
    return Visitor(history.db)


def write(history: History, *statements: Any) -> None:
    with history.db.write() as conn:
        for statement in statements:
            conn.execute(statement)


def found(page: Visitor, *clicks: str) -> str:
    """The text of the page after these clicks, from the first page on."""
    page.open("/ui/")
    page.clicks = 0
    for text in clicks:
        page.follow(text)
    assert page.clicks <= MOST_CLICKS
    return page.text


def test_a_healthy_run_has_no_advice(page: Visitor) -> None:
    assert "Nothing stands out" in found(page, "test")


def test_a_mismatch_from_a_wrong_temperature(history: History, page: Visitor) -> None:
    """The note leads to the step, and the step to the tokens with the largest difference."""
    batch = history.batches[2]
    history.db.transact(token_facts.record, history.run_id, history.epoch, batch.step_id, made_up_facts(batch))
    write(history, update(steps).where(steps.c.step == 2).values(metrics={"logprob_mismatch_mean_abs": 0.7}))
    assert "compare the temperature" in found(page, "test")
    page.follow("engine and trainer disagree")
    assert page.address.endswith("/steps/2")
    page.follow("/tokens?trajectory=")
    assert page.address.startswith("/ui/sessions/")
    assert "/tokens" in page.address
    assert page.clicks <= MOST_CLICKS


def test_a_fork_storm(history: History, page: Visitor) -> None:
    write(history, update(interactions).values(fork_reason=ForkReason.HISTORY_EDITED))
    text = found(page, "test", "could not extend an earlier one")
    assert page.address.startswith("/ui/sessions/")
    assert "fork" in text


def test_samples_that_are_too_old(history: History, page: Visitor) -> None:
    for _ in range(6):
        history.group(versions=[0])
    assert history.lease(max_staleness=0) is None
    text = found(page, "test", "too old to train")
    assert "too_old" in text


def test_a_tool_that_fails(history: History, page: Visitor) -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    asked = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    answer = codec.pack_json({"role": "assistant", "content": None, "tool_calls": [asked]})
    told = codec.pack_json([{"role": "tool", "tool_call_id": "c", "content": "Error: the index is gone"}])
    data = interaction_data.c.interaction_id
    with history.db.write() as conn:
        session_id = group_starts.start_group(conn, history.run_id, LIMITS, [codec.new_id()]).session_ids[0]
        for _ in range(12):
            parent, ids = history.call(conn, session_id, tools=tools)
            child, _ = history.call(conn, session_id, parent=parent, prompt=ids, tools=tools)
            conn.execute(update(interaction_data).where(data == parent).values(answer=answer))
            conn.execute(update(interaction_data).where(data == child).values(new_messages=told))
    text = found(page, "test", "results of tool search are errors")
    assert "Error: the index is gone" in text


def test_an_engine_that_lags(history: History, page: Visitor) -> None:
    row = {"run_id": history.run_id, "state": "serving", "last_seen_at": 1.0}
    write(history, insert(engines).values(**row, url="http://slow:1", version=history.version - 1))
    text = found(page, "test", "http://slow:1 serves version")
    assert page.address.endswith("/engines")
    assert "behind" in text


def test_all_sessions_fail(history: History, page: Visitor) -> None:
    for _ in range(6):
        history.rejected()
    failed = sessions.c.status == SessionStatus.FAILED
    write(history, update(sessions).where(failed).values(error="500 from the search service"))
    text = found(page, "test", "sessions have all failed")
    assert "500 from the search service" in text


def test_failed_calls(history: History, page: Visitor) -> None:
    write(history, update(interactions).values(status=InteractionStatus.FAILED, error="the engine is gone"))
    assert "the engine is gone" in found(page, "test", "calls have failed")


def metrics(history: History, of: Callable[[int], dict[str, float]], n: int = 24) -> None:
    """Replace the metrics by those of `n` steps."""
    history.train(n - history.step)
    for step in range(1, n + 1):
        write(history, update(steps).where(steps.c.step == step).values(metrics=of(step)))


def evaluate(history: History, step: int, version: int, reward: float) -> None:
    """A whole evaluation of twelve episodes with this reward."""
    for index in range(12):
        label = Label(step=step, version=version, episode=Episode("sampled", index, 0), episodes=12)
        (session_id,) = history.evaluation(label.metadata, versions=[version]).session_ids
        write(history, update(rewards).where(rewards.c.session_id == session_id).values(value=reward / 2))


def test_a_reward_that_is_exploited(history: History, page: Visitor) -> None:
    """The training reward rises while the held-out reward falls."""
    metrics(history, lambda step: {"reward/mean": step / 24})
    for step, reward in ((0, 0.9), (12, 0.6), (24, 0.1)):
        evaluate(history, step, step, reward)
    assert "may exploit the reward" in found(page, "test")
    page.follow("may exploit the reward")
    assert page.address.endswith("/evaluations")


def test_a_collapsed_entropy(history: History, page: Visitor) -> None:
    metrics(history, lambda step: {"reward/mean": 0.5, "entropy": 2.0 if step < 12 else 0.1})
    assert "the entropy has fallen" in found(page, "test")
