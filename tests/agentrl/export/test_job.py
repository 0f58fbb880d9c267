"""Exports of a run with every kind of row, on both databases: complete, exact, and in every format."""

import sys
from collections import Counter

import numpy as np
import orjson
import pytest
from databases import KINDS
from history import TOOLS, History
from pyarrow import parquet
from safetensors.numpy import load_file
from sqlalchemy import select
from tokenizers import Tokenizer

from agentrl.domain.schemas import TrajectoryState
from agentrl.domain.selection import Selection
from agentrl.errors import UserError
from agentrl.export import tensors
from agentrl.export.job import Job
from agentrl.store import Database, runs
from agentrl.store.calls import call_traces
from agentrl.store.exports import row_pages
from agentrl.store.exports.columns import COLUMNS
from agentrl.store.tables import interactions as interactions_table
from agentrl.store.tables import rewards, trajectories
from agentrl.store.training import steps

ARRAYS = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "temperatures", "turn_returns")


@pytest.fixture(scope="module", params=KINDS)
def db(databases, request):
    """One for all tests: they read it."""
    with databases.lent(request.param) as url:
        database = Database(url)
        yield database
        database.close()


@pytest.fixture(scope="module")
def history(db, tiny_model) -> History:
    """Two trained steps, one leased, a stale group, ready, rejected and evaluated ones; another run beside it."""
    History(db, name="other", seed=9).train(1)
    made = History(db, seed=1, base_model=str(tiny_model), likeliest=3)
    made.train(2)
    made.group(versions=[0, 1, 2])
    made.group(versions=[0])  # too old for step 3: its group becomes stale when that is leased
    made.group(tools=TOOLS)
    assert made.lease() is not None
    made.group()
    made.rejected()
    made.group(reward=False)
    made.evaluation()
    return made


@pytest.fixture
def small_pages(monkeypatch) -> None:
    """So that every export turns several."""
    monkeypatch.setattr(row_pages, "PAGE_ROWS", 3)
    monkeypatch.setattr(row_pages, "PAGE_TOKENS", 40)


def run_job(history: History, out, format_="jsonl", what="trajectories", state=None, steps_=None, **kwargs):
    seen: list[tuple[int, int]] = []
    job = Job(
        database=history.db,
        run=history.db.query(runs.get, history.run_id),
        format=format_,
        out=out,
        selection=Selection.parse(what, state, steps_),
        **kwargs,
    )
    written = job.execute(lambda done, total: seen.append((done, total)))
    assert not seen or seen[-1][0] == seen[-1][1] == written.rows
    return written


def read(path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return parquet.read_table(path).to_pylist()


def ids_of(history: History, table) -> set[str]:
    with history.db.read() as conn:
        return set(conn.execute(select(table.c.id).where(table.c.run_id == history.run_id)).scalars())


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("what", "key"),
    [
        ("trajectories", "trajectory_id"),
        ("tokens", "trajectory_id"),
        ("interactions", "id"),
        ("rewards", "id"),
        ("steps", "id"),
    ],
)
@pytest.mark.usefixtures("small_pages")
def test_every_row_is_exported_once_with_every_column(history, tmp_path, what, key, format_) -> None:
    written = run_job(history, tmp_path, format_, what)
    assert written.path == tmp_path / f"{what}.{format_}"
    found = read(written.path)
    tables = {"interactions": interactions_table, "rewards": rewards, "trajectories": trajectories}
    table = (tables | {"tokens": trajectories}).get(what)
    expected = (
        ids_of(history, table) if table is not None else {s.id for s in history.db.query(steps.of_run, history.run_id)}
    )
    assert Counter(row[key] for row in found) == Counter(expected)
    assert written.rows == len(expected) > 2
    assert set(found[0]) == set(COLUMNS[what])


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
@pytest.mark.usefixtures("small_pages")
def test_a_trained_trajectory_is_exported_as_its_step_took_it(history, tmp_path, format_) -> None:
    found = {row["trajectory_id"]: row for row in read(run_job(history, tmp_path, format_, state="trained").path)}
    assert set(found) == {t.trajectory_id for batch in history.batches.values() for t in batch.trajectories}
    for step, batch in history.batches.items():
        for t in batch.trajectories:
            row = found[t.trajectory_id]
            for name in ARRAYS:
                array = getattr(t, name)
                np.testing.assert_array_equal(np.array(row[name], array.dtype), array)
            assert (row["step"], row["state"], row["return"]) == (step, "trained", t.episode_return)
            assert row["task_id"] is not None
            assert row["advantage"] is not None
            task = row["task"] if format_ == "jsonl" else orjson.loads(row["task"])
            assert task.keys() == {"n"}


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
@pytest.mark.usefixtures("small_pages")
def test_tokens_say_why_they_are_in_the_loss_or_not(history, tmp_path, format_) -> None:
    masks = {row["trajectory_id"]: row["loss_mask"] for row in read(run_job(history, tmp_path / "a").path)}
    for row in read(run_job(history, tmp_path / "b", format_, "tokens").path):
        spans = row["loss_reasons"] if format_ == "jsonl" else orjson.loads(row["loss_reasons"])
        reasons = [reason for reason, start, end in spans for _ in range(start, end)]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        assert len(reasons) == len(row["input_ids"]) == len(row["ages"]) == len(row["entropy"])
        would_train = [reason == "trained" for reason in reasons]
        if row["state"] in ("trained", "leased"):
            assert would_train == masks[row["trajectory_id"]]
        sampled = [turn >= 0 for turn in row["turn_ids"]]
        assert sampled == [reason not in ("prompt", "message", "tool", "not sampled") for reason in reasons]
        if row["state"] in ("stale", "rejected"):
            assert not any(would_train)


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
@pytest.mark.usefixtures("small_pages")
def test_tokens_have_the_likeliest_ones_beside_them(history, tmp_path, format_) -> None:
    for row in read(run_job(history, tmp_path, format_, "tokens").path):
        calls = row["top_logprobs"] if format_ == "jsonl" else orjson.loads(row["top_logprobs"])
        places = [call["start"] + i for call in calls for i in range(len(call["ids"]))]
        assert places == [i for i, turn in enumerate(row["turn_ids"]) if turn >= 0]
        likeliest = [ids for call in calls for ids in call["ids"]]
        assert likeliest == [[row["input_ids"][i] + k for k in range(3)] for i in places]
        assert {tuple(one) for call in calls for one in call["logprobs"]} == {(-0.5, -1.5, -2.5)}


def test_the_loss_mask_says_what_a_step_takes_and_else_what_could_be_trained(history, tmp_path) -> None:
    by_state: dict[str, list[dict]] = {}
    for row in read(run_job(history, tmp_path).path):
        by_state.setdefault(row["state"], []).append(row)
    assert by_state.keys() == set(TrajectoryState)
    assert not any(any(row["loss_mask"]) for row in by_state["stale"])
    for row in by_state["ready"]:
        assert sum(row["loss_mask"]) == row["trainable_tokens"] > 0
    masked = [row for row in by_state["leased"] if 0 in row["versions"]]  # sampled by versions 0, 1, 2; two is too old
    assert masked
    for row in masked:
        assert all(version > 0 for version, train in zip(row["versions"], row["loss_mask"], strict=True) if train)


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_interactions_carry_messages_tools_and_arrays(history, tmp_path, format_) -> None:
    found = {row["id"]: row for row in read(run_job(history, tmp_path, format_, "interactions").path)}
    with history.db.read() as conn:
        session_ids = {row["session_id"] for row in found.values()}
        traces = [item for sid in session_ids for item in call_traces.trace(conn, sid)]
    assert len(traces) == len(found)

    def json(value):
        return value if format_ == "jsonl" or value is None else orjson.loads(value)

    for item in traces:
        row = found[item["id"]]
        assert row["output_ids"] == item["output_ids"]
        assert row["prompt_delta_ids"] == item["prompt_delta_ids"]
        np.testing.assert_array_equal(np.array(row["logprobs"], np.float32), np.array(item["logprobs"], np.float32))
        assert json(row["new_messages"]) == item["new_messages"]
        assert json(row["answer"]) == item["answer"]
        assert json(row["spans"]) == item["version_spans"]
        assert json(row["tools"]) == (TOOLS if row["tools_hash"] else None)
    assert any(row["tools"] for row in found.values())


def test_a_range_of_steps_selects_what_they_trained(history, tmp_path) -> None:
    second = history.batches[2].trajectories
    expected = {t.trajectory_id for t in second}
    assert {row["trajectory_id"] for row in read(run_job(history, tmp_path / "a", steps_="2").path)} == expected
    sessions = {t.session_id for t in second}
    for what in ("interactions", "rewards"):
        found = read(run_job(history, tmp_path / what, what=what, steps_="2").path)
        assert {row["session_id"] for row in found} == sessions
    assert [row["step"] for row in read(run_job(history, tmp_path / "s", what="steps", steps_="..2").path)] == [1, 2]


def test_row_groups_are_pages(history, tmp_path, small_pages) -> None:
    file = parquet.ParquetFile(run_job(history, tmp_path / "x.parquet", "parquet", "rewards").path)
    assert file.metadata.num_row_groups == -(-file.metadata.num_rows // 3) > 1


@pytest.mark.usefixtures("small_pages")
def test_tensors_of_a_selection_are_one_padded_file(history, tmp_path) -> None:
    written = run_job(history, tmp_path / "x.safetensors", "tensors", state="trained")
    loaded = load_file(written.path)
    batch = sorted((t for b in history.batches.values() for t in b.trajectories), key=lambda t: t.trajectory_id)
    for name, array in tensors.pad_batch(batch).items():
        np.testing.assert_array_equal(loaded[name], array)


def test_tensors_in_a_folder_are_the_batches(history, tmp_path) -> None:
    run_job(history, tmp_path / "x", "tensors")
    assert {file.name for file in (tmp_path / "x").iterdir()} == {"step-000001.safetensors", "step-000002.safetensors"}
    loaded = load_file(tmp_path / "x" / "step-000002.safetensors")
    for name, array in tensors.pad_batch(history.batches[2].trajectories).items():
        np.testing.assert_array_equal(loaded[name], array)


@pytest.mark.long_on("postgresql")
@pytest.mark.usefixtures("small_pages")
def test_the_areal_dump_is_text_by_version_and_task(history, tmp_path, tiny_model) -> None:
    run_job(history, tmp_path / "dump", "areal")
    lines = [
        (file.relative_to(tmp_path / "dump"), orjson.loads(line))
        for file in (tmp_path / "dump").rglob("*.jsonl")
        for line in file.read_bytes().splitlines()
    ]
    rollouts = [(path, line) for path, line in lines if path.parts[0] == "rollout"]
    evaluations = [(path, line) for path, line in lines if path.parts[0] == "eval-rollout"]
    assert len(rollouts) == len(ids_of(history, trajectories))
    assert evaluations
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    rows_ = {row["trajectory_id"]: row for row in read(run_job(history, tmp_path / "rows").path)}
    expected: Counter[tuple] = Counter()
    for row in rows_.values():
        first = next(i for i, turn in enumerate(row["turn_ids"]) if turn >= 0)
        sampled = [version for version in row["versions"] if version >= 0]
        expected[
            f"rollout/{sampled[-1]}/{row['task_id']}.jsonl",
            row["sample_index"],
            len(row["input_ids"]),
            first,
            sampled[0],
            sampled[-1],
            row["return"],
            tokenizer.decode(row["input_ids"][:first], skip_special_tokens=False),
            tokenizer.decode(row["input_ids"][first:], skip_special_tokens=False),
        ] += 1
    names = ("sample_idx", "seqlen", "prompt_len", "head_version", "tail_version", "reward", "prompt", "completion")
    assert Counter((str(path), *(line[name] for name in names)) for path, line in rollouts) == expected
    for path, line in lines:
        assert line["task_id"] == path.stem
        assert line.keys() == {"task_id", *names, "session_id", "status"}
        assert line["status"] == "completed"


def test_an_export_that_fails_leaves_nothing(history, tmp_path) -> None:
    with pytest.raises(UserError, match="--tokenizer"):
        run_job(history, tmp_path / "dump", "areal", tokenizer=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"format_": "areal", "what": "steps"}, "--format areal supports trajectories, not steps"),
        ({"format_": "tensors", "state": "ready"}, "--state: a folder of tensors has whole batches"),
    ],
)
def test_what_does_not_fit_together_is_refused(history, tmp_path, kwargs, message) -> None:
    with pytest.raises(UserError, match=message):
        run_job(history, tmp_path / "x", **kwargs)


def test_without_pyarrow_the_extra_is_named(history, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"agentrl\[export\]"):
        run_job(history, tmp_path, "parquet")
    assert list(tmp_path.iterdir()) == []
