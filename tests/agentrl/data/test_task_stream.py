"""Tasks of every kind of source, from the start and from any row on; errors name the field, the file and the line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.data import task_stream
from agentrl.data.task_stream import TaskStream, load_tasks
from agentrl.domain.schemas import Json
from agentrl.errors import UserError

ROWS: list[Json] = [{"q": f"question {n}", "n": str(n)} for n in range(50)]


def jsonl(folder: Path) -> str:
    path = folder / "t.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n\n" for row in ROWS))
    return str(path)


def zipped(folder: Path) -> str:
    path = folder / "t.jsonl.gz"
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in ROWS).encode()))
    return str(path)


def csv_file(folder: Path) -> str:
    path = folder / "t.csv"
    path.write_text("\ufeffq,n\n" + "".join(f'"{row["q"]}",{row["n"]}\n' for row in ROWS))
    return str(path)


def parquet(folder: Path) -> str:
    path = folder / "t.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    return str(path)


def parts(folder: Path) -> str:
    for number, start in enumerate((0, 20, 45)):
        end = (20, 45, 50)[number]
        pq.write_table(pa.Table.from_pylist(ROWS[start:end]), folder / f"part-{number}.parquet", row_group_size=8)
    return str(folder / "part-*.parquet")


def saved(folder: Path) -> str:
    """As `datasets.save_to_disk` writes it: Arrow streams, and a list of them."""
    split = folder / "set" / "train"
    split.mkdir(parents=True)
    (folder / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    names = []
    for number, rows in enumerate((ROWS[:30], ROWS[30:])):
        names.append({"filename": f"data-{number:05d}-of-00002.arrow"})
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(split / names[-1]["filename"]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=11)
    (split / "state.json").write_text(json.dumps({"_data_files": names, "_fingerprint": "x"}))
    return str(split)


def tasks_of(source: Any, **kwargs: Any) -> list[Json]:
    (found,) = load_tasks(source, limit=1000, **kwargs).values()
    return found


@pytest.mark.parametrize("write", [jsonl, zipped, csv_file, parquet, parts, saved])
def test_a_source_is_read_from_any_row_on(write: Callable[[Path], str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(task_stream, "BATCH_ROWS", 9)
    with TaskStream(TaskSource(path=write(tmp_path))) as stream:
        for start in range(0, 52, 3):
            batches = list(stream.batches(start))
            assert [json.loads(text) for batch in batches for text in batch.texts] == ROWS[start:]
            assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
            assert batches[-1].read == max(start, 50)
            assert [batch.read for batch in batches[:-1]] == list(range(start + 9, 51, 9))


def test_the_folder_of_several_splits_is_refused_with_their_folders(tmp_path: Path) -> None:
    split = saved(tmp_path)
    with pytest.raises(UserError, match=f"several splits: give one of {split}"):
        tasks_of(str(Path(split).parent))


def generated(seed: int) -> Iterator[Json]:
    for n in range(5):
        yield {"n": n, "seed": seed}


def test_tasks_come_from_functions_with_the_seed() -> None:
    spec = "agentrl.agents.reverse:train_tasks"
    one, other = (load_tasks(spec, seed=seed, limit=3)["train_tasks"] for seed in (1, 2))
    assert len(one) == 3
    assert one != other
    assert one == load_tasks(spec, seed=1, limit=3)["train_tasks"]
    with TaskStream(TaskSource(path=spec, limit=9), seed=1) as stream:
        assert [len(batch.texts) for batch in stream.batches(4)] == [5]
        assert json.loads(next(stream.batches(2)).texts[0]) == one[2]


def test_a_function_gets_the_arguments_of_its_source() -> None:
    source = TaskSource(path="agentrl.agents.reverse:train_tasks", args={"count": 2, "seed": 7})
    assert tasks_of(source, seed=1) == load_tasks(source.path, seed=7, limit=2)["train_tasks"]
    with pytest.raises(UserError, match=r"does not take the arguments in `args`: got an unexpected .* 'cuont'"):
        tasks_of(TaskSource(path=source.path, args={"cuont": 2}))
    with pytest.raises(ValueError, match="`args` are arguments of `module:function`"):
        TaskSource(path="t.jsonl", args={"count": 2})


def test_a_limit_counts_rows_from_the_start(tmp_path: Path) -> None:
    with TaskStream(TaskSource(path=jsonl(tmp_path), limit=10)) as stream:
        assert [batch.read for batch in stream.batches()] == [10]
        assert [len(batch.texts) for batch in stream.batches(8)] == [2]
        assert [len(batch.texts) for batch in stream.batches(10)] == [0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"a": 1}\nnonsense\n', r"tasks: .*t\.jsonl line 2 is not JSON"),
        ("t.jsonl", '{"a": 1}\n\n7\n', r"t\.jsonl line 3 is int, not a mapping"),
        ("t.jsonl", '{"a": NaN}\n', "line 1 is not JSON"),
        ("t.jsonl", '{"a": "' + "x" * 2**20 + '"}\n', r"line 1 has 1048584 bytes, a task has at most 1048576"),
        ("t.jsonl", "[" * 5000 + "\n", "line 1 is not JSON"),
        ("t.jsonl", '{"a": ' + "[" * 100 + "]" * 100 + "}\n", "line 1 is nested deeper than 64 levels"),
        ("t.jsonl", "", "yields no task"),
        ("t.csv", "a,b\n1,2\n3\n", r"t\.csv row 3 has fewer values than its header"),
        ("t.csv", "a,b\n1,2,3\n", "row 2 has more values"),
        ("t.csv", 'a,b\n1,"2\n', r"t\.csv row 2 is not CSV"),
        ("t.parquet", "nonsense", r"t\.parquet cannot be read as Parquet"),
        ("t.jsonl.gz", "\x1f\x8bnonsense", r"cannot read .*t\.jsonl\.gz"),
        ("t.txt", "x", r"cannot tell what .*t\.txt' is: give a file that ends in \.jsonl"),
    ],
)
def test_an_error_names_field_file_and_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        tasks_of(str(tmp_path / name))


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tasks: cannot read .*absent\.jsonl: No such file"):
        tasks_of(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match=r"evaluation\.tasks: no file matches"):
        tasks_of(str(tmp_path / "*.jsonl"), field="evaluation.tasks")
    with pytest.raises(UserError, match=r"without state\.json"):
        tasks_of(str(tmp_path))


def test_content_tells_whether_files_have_changed(tmp_path: Path) -> None:
    path = parts(tmp_path)
    with TaskStream(TaskSource(path=path)) as one, TaskStream(TaskSource(path=path)) as same:
        assert one.content == same.content == json.loads(json.dumps(one.content))
    (tmp_path / "part-1.parquet").write_bytes(b"other")
    with TaskStream(TaskSource(path=path)) as other:
        assert other.content != one.content


def test_an_ordered_source_begins_with_the_smallest_numbers_and_goes_on_from_any_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_stream, "BATCH_ROWS", 4)
    levels = [5, 1.5, 3, 1.5, -2, 0, 9, 3]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"n": n, "level": x}) + "\n" for n, x in enumerate(levels)))
    source = TaskSource(path=str(tmp_path / "t.jsonl"), columns={"level": "hard"}, order={"by": "hard"})
    expected = [4, 5, 1, 3, 2, 7, 0, 6]  # equal ones as the source has them
    for read in range(len(levels) + 1):
        with TaskStream(source) as stream:
            batches = list(stream.batches(read))
        assert [json.loads(text)["n"] for batch in batches for text in batch.texts] == expected[read:]
        assert batches[-1].last
        assert batches[-1].read == len(levels)


@pytest.mark.parametrize("bad", [{}, {"level": "3"}, {"level": None}, {"level": True}])
def test_a_task_without_a_number_is_named(bad: Json, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"level": 1}) + "\n" + json.dumps(bad) + "\n")
    source = TaskSource(path=str(tmp_path / "t.jsonl"), order={"by": "level"})
    with TaskStream(source) as stream, pytest.raises(UserError, match=r"order.by: task 2 has no number in its field"):
        list(stream.batches())
