"""export, replay, store prune and store backup as they are typed."""

import sqlite3
import sys

import orjson
import pytest
from history import History
from pyarrow import parquet
from typer.testing import CliRunner

from agentrl.cli.main import app, main
from agentrl.cli.store import parse_age
from agentrl.errors import UserError
from agentrl.store import Database
from agentrl.store.tables import steps


@pytest.fixture
def history(databases):
    with databases.lent("sqlite") as url:
        made = History(Database(url), seed=4)
        made.train(3)
        made.rejected()
        yield made
        made.db.close()


@pytest.fixture
def run(history):
    """Runs a command on the history's database; returns (exit status, output)."""

    def call(*args: str, run: str = "test") -> tuple[int, str]:
        named = () if args[:2] == ("store", "backup") else ("--run", run)
        result = CliRunner().invoke(app, [*args, *named, "--database-url", history.db.url])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return call


def test_export_prints_what_it_wrote(run, tmp_path) -> None:
    status, output = run("export", "--out", str(tmp_path), "--format", "jsonl", "--what", "steps", "--steps", "2..")
    assert status == 0
    file = tmp_path / "steps.jsonl"
    assert output == f"2 steps, {file.stat().st_size:,} bytes: {file}\n"
    assert [orjson.loads(line)["step"] for line in file.read_bytes().splitlines()] == [2, 3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--what", "trajectorys"], "did you mean 'trajectories'?"),
        (["--format", "parket"], "--format: 'parket' is not one of its values; did you mean 'parquet'?"),
        (["--state", "finished"], "--state: 'finished'"),
        (["--steps", "3..1"], "did you mean '1..3'?"),
        (["--what", "rewards", "--format", "areal"], "--format areal supports trajectories, not rewards"),
    ],
)
def test_wrong_options_of_export_are_named(run, tmp_path, args, message) -> None:
    with pytest.raises(UserError) as refused:
        run("export", "--out", str(tmp_path / "x"), *args)
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_nearest_run_is_named_in_one_line(history, tmp_path, monkeypatch, capsys) -> None:
    args = ["--run", "tset", "--out", str(tmp_path / "x"), "--database-url", history.db.url]
    monkeypatch.setattr(sys, "argv", ["agentrl", "export", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "agentrl: no run named 'tset'; did you mean 'test'? (`agentrl run create` makes one)\n"
    )


def test_replay_says_that_batches_are_identical(run, history) -> None:
    status, output = run("replay", "--steps", "2..3")
    assert status == 0
    lines = []
    for step in (2, 3):
        batch = history.batches[step].trajectories
        tokens = sum(int(t.loss_mask.sum()) for t in batch)
        lines.append(f"step {step}: {len(batch)} trajectories, {tokens:,} tokens, identical\n")
    assert output == "".join(lines)


def test_replay_exits_with_1_and_names_the_step_that_differs(run, history) -> None:
    with history.db.write() as conn:
        conn.execute(steps.update().where(steps.c.step == 2).values(batch_digest="0" * 32))
    status, output = run("replay", "--steps", "1..3")
    assert status == 1
    assert [line.endswith("identical") for line in output.splitlines()[:3]] == [True, False, True]
    assert output.splitlines()[1].startswith("step 2: ")
    assert "1 of 3 batches differ from what was trained" in output


def test_replay_with_another_credit_shows_a_table_and_writes_the_batches(run, tmp_path, monkeypatch) -> None:
    (tmp_path / "my_judge.py").write_text("def judge(session):\n    return float(session['sample_index'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    status, output = run("replay", "--steps", "1", "--rescore", "my_judge:judge", "--out", str(out))
    assert status == 0
    assert "identical" in output
    assert "|Δ advantage|" in output
    found = parquet.read_table(out / "step-000001.parquet").to_pylist()
    assert {row["return"] == 0.0 for row in found} == {True, False}  # by sample index: 0, and 1 discounted over turns
    assert all(row["return"] != row["old_return"] for row in found)
    assert len({row["session_id"] for row in found}) == 4
    with pytest.raises(UserError, match="exists"):
        run("replay", "--steps", "1", "--out", str(out))
    with pytest.raises(UserError, match="did you mean 'judge'"):
        run("replay", "--steps", "1", "--rescore", "my_judge:juge")


def test_a_dry_run_of_prune_shows_what_prune_then_removes(run, history) -> None:
    told = run("store", "prune", "--older-than", "0s", "--dry-run")
    assert told[0] == 0
    assert "           1 groups\n" in told[1]
    assert "bytes of tokens and messages would be removed" in told[1]
    done = run("store", "prune", "--older-than", "0s", "--vacuum")
    assert done == (0, told[1].replace("would be removed", "removed"))
    assert "           0 groups\n" in run("store", "prune", "--older-than", "0s")[1]
    assert run("store", "check")[0] == 0
    assert run("replay", "--steps", "1..")[0] == 0


def test_prune_keeps_rows_as_new_as_the_newest_steps(run, history) -> None:
    assert "           0 groups\n" in run("store", "prune", "--keep-steps", "1")[1]  # rejected after step 3 began
    history.train(1)
    assert "           1 groups\n" in run("store", "prune", "--keep-steps", "1")[1]


@pytest.mark.parametrize("args", [[], ["--older-than", "7d", "--keep-steps", "3"]])
def test_prune_needs_exactly_one_bound(run, args) -> None:
    with pytest.raises(UserError, match="either --older-than or --keep-steps"):
        run("store", "prune", *args)


@pytest.mark.parametrize(("text", "seconds"), [("7d", 604800), ("12h", 43200), ("1.5w", 907200), ("30 m", 1800)])
def test_an_age_is_parsed_into_seconds(text, seconds) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "7y", "-1d", "7dd"])
def test_an_invalid_age_is_refused(text) -> None:
    with pytest.raises(UserError, match="--older-than"):
        parse_age(text)


def test_backup_makes_a_database_that_can_be_used(run, history, tmp_path) -> None:
    target = tmp_path / "copy.db"
    status, output = run("store", "backup", str(target))
    assert status == 0
    assert f"{target.stat().st_size:,} bytes in {target}" in output
    with sqlite3.connect(target) as conn:
        assert conn.execute("SELECT count(*) FROM steps").fetchone() == (3,)
    with pytest.raises(UserError, match="--force"):
        run("store", "backup", str(target))
    assert run("store", "backup", str(target), "--force")[0] == 0
