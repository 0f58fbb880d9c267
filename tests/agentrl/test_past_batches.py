"""A past batch, byte for byte, whatever happened since; and under another credit."""

import subprocess
from dataclasses import replace

import numpy as np
import pytest
from history import TOOLS, History
from pyarrow import parquet
from sqlalchemy import make_url, select, update

from agentrl import past_batches
from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Batch
from agentrl.domain.selection import StepRange
from agentrl.errors import UserError
from agentrl.export.row_writers import ParquetWriter
from agentrl.store import Database, runs
from agentrl.store.db import codec
from agentrl.store.tables import groups, interaction_data, interactions, metadata, steps
from agentrl.store.tables import runs as runs_table
from agentrl.store.training import rewards
from agentrl.store.upkeep import backup, retention
from agentrl.trainer.algorithms.advantages import turn_advantages

ARRAYS = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures", "turn_returns")


@pytest.fixture
def db(database_url):
    database = Database(database_url)
    yield database
    database.close()


def frozen(batch: Batch) -> Batch:
    """A copy of every array, so that nothing is compared with itself."""
    return replace(
        batch,
        trajectories=[replace(t, **{name: getattr(t, name).copy() for name in ARRAYS}) for t in batch.trajectories],
    )


def step_of(history: History, number: int):
    (step,) = past_batches.chosen_steps(
        history.db, history.db.query(runs.get, history.run_id), StepRange(number, number)
    )
    return step


def assert_identical(db: Database, history: History, kept: dict[int, Batch]) -> None:
    chosen = past_batches.chosen_steps(db, db.query(runs.get, history.run_id), StepRange(1, None))
    assert [step.step for step in chosen] == sorted(kept)
    for step in chosen:
        checked = past_batches.check(db, step)
        assert checked.fault is None
        assert str(checked).endswith("identical")
        before, after = kept[step.step], checked.batch
        assert (after.version, after.ages, after.wasted_tokens) == (before.version, before.ages, before.wasted_tokens)
        assert len(after.trajectories) == len(before.trajectories)
        for then, now in zip(before.trajectories, after.trajectories, strict=True):
            for name in ARRAYS:
                assert getattr(now, name).dtype == getattr(then, name).dtype
                assert getattr(now, name).tobytes() == getattr(then, name).tobytes()
            for name in ("trajectory_id", "session_id", "episode_id", "group_id", "episode_return"):
                assert getattr(now, name) == getattr(then, name)


def test_a_batch_of_an_earlier_release_is_checked_by_its_own_digest(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    (batch,) = history.batches.values()
    for digest, fault in ((batch.serial_digest(), False), ("0" * 32, True), (batch.digest(), False), ("t" * 32, True)):
        with db.write() as conn:
            conn.execute(update(steps).where(steps.c.id == batch.step_id).values(batch_digest=digest))
        assert (past_batches.check(db, step_of(history, 1)).fault is not None) == fault


@pytest.mark.long_on("postgresql")
def test_a_batch_is_rebuilt_identically_after_later_events(db, databases, database_kind, tmp_path) -> None:
    history = History(db, seed=2)
    history.train(2)
    history.group(versions=[0, 1, 2])  # its oldest tokens leave the loss of step 3
    history.group(tools=TOOLS)
    history.train(3)
    kept = {step: frozen(batch) for step, batch in history.batches.items() if step <= 4}
    assert any(batch.wasted_tokens for batch in kept.values())
    lost = frozen(history.batches[5])

    history.go_back(4)  # step 5 is rolled back; its successor makes another version
    history.train(2)
    kept |= {step: frozen(history.batches[step]) for step in (5, 6)}
    assert kept[5].step_id != lost.step_id
    assert_identical(db, history, kept)

    with db.write() as conn:  # late rewards for all that trained: kept as facts, not applied
        sessions = {t.session_id for batch in kept.values() for t in batch.trajectories}
        for session_id in sessions:
            assert not rewards.add(conn, session_id, value=100.0, discount=0.9).applied
    for _ in range(3):
        history.rejected()
        history.evaluation()
    history.group(reward=False)
    assert_identical(db, history, kept)

    assert retention.prune(db, history.run_id, 2**40).rows["groups"] == 7
    assert_identical(db, history, kept)

    db.close()
    reopened = Database(db.url)
    assert_identical(reopened, history, kept)
    backup.backup(reopened, tmp_path / "copy")
    reopened.close()

    if database_kind == "sqlite":
        copy = Database(f"sqlite:///{tmp_path / 'copy'}")
        assert_identical(copy, history, kept)
        copy.close()
    else:
        url = databases.new("postgresql", migrated=False)
        uri = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        subprocess.run(
            ["pg_restore", "--no-owner", "--exit-on-error", f"--dbname={uri}", tmp_path / "copy"], check=True
        )
        copy = Database(url)
        assert_identical(copy, history, kept)
        copy.close()
        databases.drop(url)


def a_trained_call(history: History, number: int) -> str:
    """A call whose output step `number` trained."""
    one = history.batches[number].trajectories[0]
    with history.db.read() as conn:
        query = (
            select(interactions.c.id)
            .join(groups, groups.c.id == one.group_id)
            .where(interactions.c.session_id == one.session_id, interactions.c.role == "main")
        )
        return conn.execute(query.order_by(interactions.c.seq)).scalars().first()


@pytest.mark.long_on("postgresql")
def test_a_tampered_logprob_is_found_in_its_step_and_no_other(db) -> None:
    history = History(db, seed=1)
    history.train(3)
    call_id = a_trained_call(history, 2)
    with db.write() as conn:
        column = interaction_data.c.logprobs
        mine = interaction_data.c.interaction_id == call_id
        logprobs = codec.unpack_logprobs(conn.execute(select(column).where(mine)).scalar_one()).copy()
        logprobs[0] = np.nextafter(logprobs[0], np.float32(-1))  # the smallest change there is
        conn.execute(interaction_data.update().where(mine).values(logprobs=codec.pack_logprobs(logprobs)))
    checks = [past_batches.check(db, step_of(history, number)) for number in (1, 2, 3)]
    assert [checked.fault is None for checked in checks] == [True, False, True]
    assert "step 2: " in str(checks[1])
    assert "DIFFERENT" in str(checks[1])


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("damage", ["not zstd", "gone"])
def test_a_batch_that_cannot_be_rebuilt_is_different(db, damage) -> None:
    history = History(db, seed=1)
    history.train(1)
    mine = interaction_data.c.interaction_id == a_trained_call(history, 1)
    with db.write() as conn:
        if damage == "gone":
            conn.execute(interaction_data.delete().where(mine))
        else:
            conn.execute(interaction_data.update().where(mine).values(output_ids=b"nonsense"))
    assert "DIFFERENT" in str(past_batches.check(db, step_of(history, 1)))


@pytest.mark.long_on("postgresql")
def test_steps_that_are_not_there_are_refused(db) -> None:
    history = History(db)
    run = db.query(runs.get, history.run_id)
    with pytest.raises(UserError, match="no step yet"):
        past_batches.chosen_steps(db, run, StepRange(1, None))
    history.train(2)
    history.group()
    history.group()
    history.lease()  # step 3 is not complete
    for wanted in (StepRange(3, 3), StepRange(1, 3), StepRange(7, None)):
        with pytest.raises(UserError, match=r"has steps 1\.\.2, not "):
            past_batches.chosen_steps(db, run, wanted)
    assert [step.step for step in past_batches.chosen_steps(db, run, StepRange(2, None))] == [2]


def everything(db: Database) -> dict[str, list]:
    with db.read() as conn:
        return {
            name: [tuple(row) for row in conn.execute(select(table).order_by(*table.primary_key.columns))]
            for name, table in metadata.tables.items()
        }


def test_the_recorded_credit_changes_nothing(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    for credit in (
        past_batches.Credit(judge=lambda session: None),
        past_batches.Credit(discount=0.9),
        past_batches.Credit(),
    ):
        again = past_batches.recredit(db, step, batch, credit)
        assert all(c.old_return == c.new_return and c.old_advantage == c.new_advantage for c in again.changes)
        assert (again.shift().advantage, again.shift().flipped) == (0.0, 0)


def test_another_credit_is_computed_and_the_store_is_not_touched(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    before = everything(db)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    by_session = {t.session_id: t for t in batch.trajectories}

    def judge(session):
        """The opposite of what was recorded."""
        return -by_session[session["id"]].episode_return

    again = past_batches.recredit(db, step, batch, past_batches.Credit(judge=judge, discount=1.0, estimator="dr_grpo"))
    for then, now, advantages, change in zip(
        batch.trajectories, again.trajectories, again.advantages, again.changes, strict=True
    ):
        assert now.episode_return == -then.episode_return
        expected = now.turn_returns - np.mean([t.episode_return for t in by_group(again, now.group_id)])
        np.testing.assert_allclose(advantages, expected, atol=1e-6)
        assert (change.old_return, change.new_return) == (then.episode_return, now.episode_return)
    old = turn_advantages(batch.trajectories, Algorithm())
    for t, advantages, change in zip(batch.trajectories, old, again.changes, strict=True):
        trained = t.turn_ids[t.loss_mask]
        assert change.old_advantage == (float(advantages[trained].mean()) if len(trained) else None)
    shift = again.shift()
    assert shift.flipped > 0
    assert shift.new_return == pytest.approx(-shift.old_return)
    assert everything(db) == before


def test_a_greedy_baseline_is_compared_with_only_where_there_is_one(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    with pytest.raises(UserError, match="step 1: remax compares with greedy episodes, which its groups lack"):
        past_batches.recredit(db, step, batch, past_batches.Credit(estimator="remax"))


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ({"preset": "ppo"}, "a critic"),
        ({"preset": "rloo", "kl_coef": 0.1}, "a reference policy"),
        ({"distill_coef": 0.1}, "a teacher, whose outputs for trajectory"),
    ],
)
def test_credit_from_other_models_is_not_recomputed(db, algorithm, model) -> None:
    history = History(db, seed=4)
    history.train(1)
    config = history.db.query(runs.get, history.run_id).config
    with db.write() as conn:
        conn.execute(
            update(runs_table).values(config=config | {"trainer": config["trainer"] | {"algorithm": algorithm}})
        )
    step = step_of(history, 1)
    with pytest.raises(UserError, match=f"step 1 was trained with {model}"):
        past_batches.recredit(db, step, past_batches.check(db, step).batch, past_batches.Credit(estimator="grpo"))


def test_the_runs_algorithm_reproduces_the_recorded_credit(db) -> None:
    history = History(db, seed=4)
    history.train(1)
    algorithm = {"preset": "dr_grpo", "credit": "trajectory", "overlong_tokens": 4, "overlong_buffer": 2}
    config = history.db.query(runs.get, history.run_id).config
    with db.write() as conn:
        conn.execute(
            update(runs_table).values(config=config | {"trainer": config["trainer"] | {"algorithm": algorithm}})
        )
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    again = past_batches.recredit(db, step, batch, past_batches.Credit())
    for got, expected in zip(
        again.advantages, turn_advantages(batch.trajectories, Algorithm(**algorithm)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    other = past_batches.recredit(db, step, batch, past_batches.Credit(estimator="rloo"))
    for got, expected in zip(
        other.advantages, turn_advantages(batch.trajectories, Algorithm(preset="rloo")), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def by_group(again: past_batches.Recredited, group_id: str):
    """One trajectory per episode."""
    return {t.episode_id: t for t in again.trajectories if t.group_id == group_id}.values()


def test_a_judge_gets_the_whole_session_and_may_reward_calls(db) -> None:
    history = History(db, seed=7)
    history.train(1)
    step = step_of(history, 1)
    seen = {}

    def judge(session):
        seen[session["id"]] = session
        return {session["calls"][0]["id"]: 5.0}

    batch = past_batches.check(db, step).batch
    again = past_batches.recredit(db, step, batch, past_batches.Credit(judge=judge))
    assert {t.episode_return for t in again.trajectories} == {5.0}
    assert seen.keys() == {t.session_id for t in batch.trajectories}
    for session in seen.values():
        assert session["task"].keys() == {"n"}
        assert session["metadata"] == {}
        assert {reward["name"] for reward in session["rewards"]} == {"reward", "turn"}
        main = [call for call in session["calls"] if call["role"] == "main"]
        chain = [main[-1]]
        while chain[0]["parent_id"]:
            chain.insert(0, next(call for call in main if call["id"] == chain[0]["parent_id"]))
        assert session["messages"] == [m for call in chain for m in (*call["new_messages"], call["answer"])]
    assert any(len(session["messages"]) > 2 for session in seen.values())


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (float("nan"), "finite"),
        (1.7e308, "of at most ±1e.06"),
        (10**400, "of at most ±1e.06"),
        ("good", "finite"),
        (True, "finite"),
        ({"nope": 1.0}, "has no call 'nope'"),
    ],
)
def test_an_invalid_return_value_of_a_judge_is_refused(db, verdict, message) -> None:
    history = History(db)
    history.train(1)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    with pytest.raises(UserError, match=message):
        past_batches.recredit(db, step, batch, past_batches.Credit(judge=lambda session: verdict))


def test_a_new_score_has_no_name_to_be_compared_by(db) -> None:
    history = History(db)
    history.train(1)
    step = step_of(history, 1)
    credit = past_batches.Credit(judge=lambda session: 1.0, estimator="gdpo")
    with pytest.raises(UserError, match=r"--rescore: the advantages .* compare rewards name by name"):
        past_batches.recredit(db, step, past_batches.check(db, step).batch, credit)


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("estimator", ["gdpo", "gigpo"])
def test_rewards_by_name_and_states_are_in_a_rebuilt_batch(db, estimator) -> None:
    history = History(db, seed=4)
    history.train(1)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    for t in batch.trajectories:
        assert sum(t.named_returns.values()) == pytest.approx(t.episode_return)
        assert len(t.calls) == len(t.prompts) == len(t.turn_returns)
    assert {name for t in batch.trajectories for name in t.named_returns} == {"reward", "turn"}
    found = past_batches.recredit(db, step, batch, past_batches.Credit(estimator=estimator))
    assert any(a.any() for a in found.advantages)


def test_credit_options_are_validated() -> None:
    with pytest.raises(UserError, match="--discount"):
        past_batches.Credit(discount=1.5)
    with pytest.raises(UserError, match="did you mean 'dr_grpo'"):
        past_batches.Credit(estimator="drgrpo")
    with pytest.raises(UserError, match="no estimator 'ppo'"):  # the store does not hold a critic's values
        past_batches.Credit(estimator="ppo")


def test_rebuilt_batches_are_written_as_parquet(db, tmp_path) -> None:
    history = History(db, seed=4)
    history.train(1)
    step = step_of(history, 1)
    batch = past_batches.check(db, step).batch
    again = past_batches.recredit(db, step, batch, past_batches.Credit(estimator="rloo"))
    with ParquetWriter(tmp_path / "x.parquet", past_batches.COLUMNS) as writer:
        writer.write(past_batches.records(step, again))
    found = parquet.read_table(tmp_path / "x.parquet").to_pylist()
    for row, t, advantages, change in zip(found, batch.trajectories, again.advantages, again.changes, strict=True):
        for name in ARRAYS:
            np.testing.assert_array_equal(np.array(row[name], getattr(t, name).dtype), getattr(t, name))
        np.testing.assert_array_equal(np.array(row["turn_advantages"], np.float32), advantages)
        assert (row["advantage"], row["old_advantage"]) == (change.new_advantage, change.old_advantage)
        assert (row["step"], row["return"], row["old_return"]) == (1, t.episode_return, t.episode_return)
