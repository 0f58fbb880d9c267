"""The page of a step: its groups and trajectories, where engine and trainer differ, and another credit."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from history import History
from page_visits import HOSTILE, links, page, tables, text, visit
from sqlalchemy import select, update

from agentrl.dashboard.page_rendering import number
from agentrl.domain.batches.reward_scaling import Scale
from agentrl.domain.schemas import FACTS, MASKED_FACTS, Batch, TokenFacts
from agentrl.store import Database
from agentrl.store.tables import groups, sessions, steps, tasks, trajectories
from agentrl.store.training import returns, token_facts
from agentrl.store.training import steps as training_steps
from agentrl.store.views.results import step_batch, step_doubts, step_rows

GROUPS, PATHS, CREDIT = "Groups of the step", "Trajectories of the step", "Returns under another discount"


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=1)
    made.train(4)
    return made


def keep_facts(history: History, batch: Batch, gaps: dict[str, float]) -> None:
    """Record facts in which the trainer's logprobs differ from the engine's by these gaps, by trajectory."""
    facts = {}
    for tokens in batch.trajectories:
        mask = tokens.loss_mask
        table = np.zeros((len(FACTS), int(mask.sum())), np.float32)
        table[FACTS.index("logprob")] = tokens.logprobs[mask] + gaps[tokens.trajectory_id]
        masked = np.zeros((len(MASKED_FACTS), int(tokens.masked_outputs.sum())), np.float32)
        facts[tokens.trajectory_id] = TokenFacts(table, masked)
    history.db.transact(token_facts.record, history.run_id, history.epoch, batch.step_id, facts)


def test_groups_have_their_task_and_the_returns_of_their_episodes(history: History, db: Database) -> None:
    html = page(db, "/runs/test/steps/2")
    rows = tables(html)[GROUPS]
    batch = history.batches[2]
    of_group: dict[str, dict[str, float]] = {}
    for tokens in batch.trajectories:
        of_group.setdefault(tokens.group_id, {})[tokens.episode_id] = tokens.episode_return
    assert len(rows) == len(of_group) == 2
    for row in rows:
        (values,) = (found for group_id, found in of_group.items() if group_id.endswith(row[1]))
        assert sorted(row[4].split()) == sorted(number(value) for value in values.values())
        assert row[3] == number(fmean(values.values()))
        assert row[2] == "trained"
    for session_id in {tokens.session_id for tokens in batch.trajectories}:
        assert f"/ui/sessions/{session_id}" in links(html)
    assert {"/ui/runs/test/steps/1", "/ui/runs/test/steps/3"} <= set(links(html))


@pytest.mark.long_on("postgresql")
def test_a_tied_group_is_marked(history: History, db: Database) -> None:
    group_id = history.batches[2].trajectories[0].group_id
    with db.write() as conn:
        conn.execute(update(trajectories).where(trajectories.c.group_id == group_id).values({"return": 0.5}))
    rows = tables(page(db, "/runs/test/steps/2"))[GROUPS]
    assert sorted(row[2] for row in rows) == ["trained", "trained tied"]


@pytest.mark.long_on("postgresql")
def test_trajectories_have_their_credit_and_lead_to_their_tokens(history: History, db: Database) -> None:
    html = page(db, "/runs/test/steps/2?order=advantage")
    rows = tables(html)[PATHS]
    stored = db.query(lambda conn: step_batch.paths(conn, step_rows.attempts(conn, history.run_id, 2)[0]))
    assert len(rows) == len(stored)
    sizes = [abs(float(row[4])) for row in rows if row[4] != "–"]
    assert sizes == sorted(sizes, reverse=True)
    for path in stored:
        (row,) = (row for row in rows if path["id"].endswith(row[0]))
        figures = [path[name] for name in ("return_", "advantage", "staleness_max", "staleness_mean", "tokens_trained")]
        assert row[3:] == [number(value) for value in figures]
        assert f"/ui/sessions/{path['session_id']}/tokens?trajectory={path['id']}" in links(html)
    assert "cannot be compared" in text(html)


@pytest.mark.long_on("postgresql")
def test_trajectories_that_engine_and_trainer_disagree_about_come_first(history: History, db: Database) -> None:
    batch = history.batches[2]
    trained = [tokens for tokens in batch.trajectories if tokens.loss_mask.any()]
    gaps = {tokens.trajectory_id: 0.125 * (7 * n % 5 + n / 64) for n, tokens in enumerate(batch.trajectories)}
    keep_facts(history, batch, gaps)
    rows = tables(page(db, "/runs/test/steps/2"))[PATHS]
    found = [(row[0], row[8]) for row in rows if row[8] != "–"]
    assert len(found) == len(trained)
    expected = sorted((gaps[tokens.trajectory_id], tokens.trajectory_id) for tokens in trained)[::-1]
    assert [name for name, _ in found] == [trajectory_id[-10:] for _, trajectory_id in expected]
    assert [float(value) for _, value in found] == pytest.approx([gap for gap, _ in expected], rel=1e-3, abs=1e-6)


def test_the_mismatch_of_the_same_weights_leaves_older_tokens_out(db: Database) -> None:
    history = History(db, seed=1)
    history.train(1)
    history.group(versions=[0, 1])
    history.group(versions=[1])
    batch = history.lease()
    assert batch is not None
    history.complete(batch)
    facts = {}
    for tokens in batch.trajectories:
        mask = tokens.loss_mask
        table = np.zeros((len(FACTS), int(mask.sum())), np.float32)
        gap = np.where(tokens.versions[mask] == 1, 0.125, 0.5)
        table[FACTS.index("logprob")] = tokens.logprobs[mask] + gap
        masked = np.zeros((len(MASKED_FACTS), int(tokens.masked_outputs.sum())), np.float32)
        facts[tokens.trajectory_id] = TokenFacts(table, masked)
    db.transact(token_facts.record, history.run_id, history.epoch, batch.step_id, facts)
    step = db.query(step_rows.attempts, history.run_id, 2)[0]
    doubts, left_out = db.query(step_doubts.of_step, step)
    assert left_out == 0
    assert any(doubt.mean > 0.126 for doubt in doubts)
    same = [doubt.same for doubt in doubts if doubt.same is not None]
    assert same == pytest.approx([0.125] * len(same), rel=1e-5)
    assert same


def test_a_step_with_more_tokens_than_are_compared_says_so(
    history: History, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = history.batches[2]
    keep_facts(history, batch, dict.fromkeys((tokens.trajectory_id for tokens in batch.trajectories), 0.5))
    first = min(batch.trajectories, key=lambda tokens: tokens.trajectory_id)
    monkeypatch.setattr(step_doubts, "MOST_TOKENS", len(first.input_ids))
    assert f"{len(batch.trajectories) - 1} more trajectories were measured" in text(page(db, "/runs/test/steps/2"))


@pytest.mark.long_on("postgresql")
def test_another_discount_gives_the_returns_that_replay_gives(history: History, db: Database) -> None:
    html = page(db, "/runs/test/steps/3?discount=0.5")
    rows = tables(html)[CREDIT]
    ids = sorted({tokens.session_id for tokens in history.batches[3].trajectories})
    new = db.query(returns.of_sessions, ids, 0.5)
    old = {tokens.trajectory_id: tokens for tokens in history.batches[3].trajectories}
    assert len(rows) == len(old)
    for row in rows:
        (tokens,) = (one for trajectory_id, one in old.items() if trajectory_id.endswith(row[0]))
        assert row[1] == number(tokens.episode_return)
        assert row[2] == number(new[tokens.session_id].episode_return)
    assert "agentrl replay --run test --steps 3 --discount 0.5" in text(html)
    same = tables(page(db, "/runs/test/steps/3?discount=0.9"))[CREDIT]
    assert all(row[1] == row[2] and row[3] == row[4] and row[6] == "" for row in same)


@pytest.mark.long_on("postgresql")
def test_another_discount_compares_rewards_as_they_are_trained(db: Database) -> None:
    made = History(db, seed=1)
    made.scales = {"reward": Scale(normalize="running"), "turn": Scale(clip=(0.0, 0.1))}
    made.train(3)
    trained = made.batches[3].trajectories
    replayed = db.query(training_steps.batch, made.batches[3].step_id, discount=0.5).trajectories
    rows = {row[0]: row for row in tables(page(db, "/runs/test/steps/3?discount=0.5"))[CREDIT]}
    assert len(rows) == len(trained)
    for old, new in zip(trained, replayed, strict=True):
        row = rows[next(name for name in rows if old.trajectory_id.endswith(name))]
        assert (row[1], row[2]) == (number(old.episode_return), number(new.episode_return))


@pytest.mark.long_on("postgresql")
def test_a_group_leads_to_the_same_tasks_group_of_an_earlier_step(history: History, db: Database) -> None:
    with db.write() as conn:
        first, _ = conn.execute(select(groups.c.id).order_by(groups.c.cursor).limit(2)).scalars()
        task_id = conn.execute(select(groups.c.task_id).where(groups.c.id == first)).scalar_one()
    again = history.batches[4].trajectories[0].group_id
    with db.write() as conn:
        conn.execute(update(groups).where(groups.c.id == again).values(task_id=task_id))
    html = page(db, "/runs/test/steps/4")
    wanted = [href for href in links(html) if f"left={first}" in href and f"right={again}" in href]
    assert wanted == [f"/ui/runs/test/tasks/{task_id}?left={first}&right={again}"]
    assert "3 steps ago" in text(html)
    sides = page(db, wanted[0].removeprefix("/ui"))
    assert "Side by side" in sides


@pytest.mark.long_on("postgresql")
def test_metrics_are_drawn(history: History, db: Database) -> None:
    metrics = {"off_policy/age_0": 0.25, "off_policy/age_1": 0.75, "time/train": 12.5, "entropy": 0.5, "odd": None}
    with db.write() as conn:
        conn.execute(update(steps).where(steps.c.step == 2).values(metrics=metrics))
    html = page(db, "/runs/test/steps/2")
    assert 'aria-label="Age: 0 versions 25.0%, 1 version 75.0%"' in html
    assert 'aria-label="Seconds: train 12 s"' in html
    assert html.count('class="lane"') == 4  # two groups of two episodes
    assert tables(html)["Metrics of the step"][0] == ["entropy", "0.5000"]


def test_a_step_that_is_leased_and_one_that_was_rolled_back(history: History, db: Database) -> None:
    history.group()
    history.group()
    assert history.lease() is not None
    started = page(db, "/runs/test/steps/5")
    assert "can be replayed once it is trained" in text(started)
    assert len(tables(started)[GROUPS]) == 2
    history.go_back(2)
    gone = page(db, "/runs/test/steps/4")
    assert "This attempt was rolled back" in text(gone)
    assert all(row[2] == "ready" for row in tables(gone)[PATHS])
    assert len(tables(gone)[GROUPS]) == 2


@pytest.mark.long_on("postgresql")
def test_what_others_wrote_is_text(history: History, db: Database) -> None:
    with db.write() as conn:
        conn.execute(update(tasks).values(data={"prompt": HOSTILE, HOSTILE: HOSTILE}))
        conn.execute(update(trajectories).values(reason=HOSTILE[:100]))
        conn.execute(update(sessions).values(error=HOSTILE))
        conn.execute(update(steps).values(metrics={HOSTILE: 1.0, f"time/{HOSTILE}": 1.0}, estimator=HOSTILE[:32]))
    html = page(db, "/runs/test/steps/2")
    assert "\\x1b[31mred" in html
    assert "{{ 7777 * 7777 }}" in html


@pytest.mark.long_on("sqlite")
@pytest.mark.parametrize(
    "name",
    [
        "7",
        pytest.param("x", marks=pytest.mark.long),
        pytest.param("-1", marks=pytest.mark.long),
        "99999999999999",
        pytest.param("²", marks=pytest.mark.long),
        "%00",
    ],
)
def test_an_unknown_step_is_not_found(history: History, db: Database, name: str) -> None:
    assert visit(db, f"/runs/test/steps/{name}").status_code == 404
    assert visit(db, f"/runs/test/steps/1?attempt={name}").status_code in (400, 404)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("query", "name"), [("discount=2", "discount"), ("discount=x", "discount"), ("order=x", "order")]
)
def test_a_bad_parameter_is_refused_by_name(history: History, db: Database, query: str, name: str) -> None:
    found = visit(db, f"/runs/test/steps/1?{query}")
    assert found.status_code == 400
    assert name in found.text
