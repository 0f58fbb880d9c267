"""Tasks are stored batch by batch; after kill -9 at any moment the rest is stored without gap or repetition."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from agentrl.configs.config_files import load_config, parse_config
from agentrl.configs.episodes import task_sources
from agentrl.configs.run_config import RunConfig
from agentrl.data import task_stream
from agentrl.domain.task_order import BLOCK
from agentrl.errors import ConfigError, RequestError, UserError
from agentrl.launch.create import create_run
from agentrl.launch.run_lifecycle import open_run
from agentrl.launch.tasks import task_ingestion
from agentrl.store import Database, runs, task_rows
from agentrl.store.audit import run_audit

ROWS = 3000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(ROWS)))
    (tmp_path / "b.jsonl").write_text("".join(f'{{"n": {-n}}}\n' for n in range(ROWS // 2)))
    monkeypatch.setattr(task_stream, "BATCH_ROWS", 100)
    return tmp_path


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A source that never ends."""
    source = "import itertools\ndef tasks():\n    return ({'n': n} for n in itertools.count())\n"
    (tmp_path / "endless.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(task_stream, "BATCH_ROWS", BLOCK // 4)
    monkeypatch.setattr(task_ingestion, "POLL_S", 0.01)
    yield "endless:tasks"
    sys.modules.pop("endless", None)


def take(database: Database, cursor: int, status: str = "running") -> None:
    """The run takes the tasks before `cursor`."""
    with database.write() as conn:
        conn.execute(text("UPDATE runs SET data_cursor = :n, status = :status"), {"n": cursor, "status": status})


def config_of(folder: Path, url: str, tasks: Any = None, **settings: Any) -> RunConfig:
    sources = [{"path": f"{folder}/a.jsonl", "weight": 2}, f"{folder}/b.jsonl"]
    base = {"name": "r", "model": "tiny", "steps": 0, "runs_dir": str(folder / "runs"), "database_url": url}
    return parse_config({**base, "tasks": sources if tasks is None else tasks, **settings})


def order(url: str, count: int) -> list[int]:
    database = Database(url)
    with database.read() as conn:
        run = runs.by_name(conn, "r")
        found = [task_rows.task_at(conn, run.id, cursor, run.seed).data["n"] for cursor in range(count)]
        assert conn.execute(text("SELECT count(*) FROM tasks")).scalar_one() == sum(
            source.stored for source in task_rows.sources(conn, run.id)
        )
    database.close()
    return found


def test_progress_grows_and_sources_grow_in_proportion(folder: Path, database_url: str) -> None:
    seen: list[task_ingestion.Progress] = []
    create_run(config_of(folder, database_url), "key", seen.append)
    assert [progress.stored for progress in seen] == sorted(progress.stored for progress in seen)
    assert (seen[-1].stored, seen[-1].complete, seen[-1].usable) == (ROWS + ROWS // 2, True, True)
    assert not any(progress.complete for progress in seen[:-1])
    with pytest.raises(UserError, match="a run named 'r' already exists"):
        create_run(config_of(folder, database_url), "key")


KILLED = """
import sys
from pathlib import Path
from agentrl.configs.config_files import load_config
from agentrl.data import task_stream
from agentrl.launch.create import create_run
from agentrl.launch.run_lifecycle import open_run
task_stream.BATCH_ROWS = 100
def show(progress):
    print(progress.stored, flush=True)
    sys.stdin.readline()
create_run(load_config(Path(sys.argv[1])), "key", show)
"""


@pytest.mark.long_on("postgresql")
def test_after_kill_9_the_rest_is_stored_and_the_order_is_the_same(
    folder: Path, database_url: str, empty_database_url: str
) -> None:
    Database(empty_database_url).upgrade()
    create_run(config_of(folder, empty_database_url, runs_dir=str(folder / "whole")), "key")
    want = order(empty_database_url, 2 * ROWS)
    config = config_of(folder, database_url)
    file = folder / "c.yaml"
    file.write_text(config.model_dump_json())
    chance = random.Random(4)
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(chance.randrange(2, 9)):
            assert process.stdout.readline()
            process.stdin.write("\n")
            process.stdin.flush()
        os.kill(process.pid, signal.SIGKILL)  # in the middle of the next batch
        process.communicate()
    create_run(config, "key")
    assert order(database_url, 2 * ROWS) == want
    assert len(set(want[:ROWS])) > ROWS // 2


@pytest.mark.long_on("postgresql")
def test_two_processes_store_the_same_tasks_once(folder: Path, database_url: str) -> None:
    config = config_of(folder, database_url)
    database = Database(database_url)
    with database.write() as conn:
        run_id = runs.create(
            conn, name="r", config={}, sources=task_ingestion.check(config), base_model="t", key="k", seed=0, steps=1
        )
    steps = [task_ingestion.ingest(database, run_id, config) for _ in range(2)]
    done: set[Iterator[Any]] = set()
    chance = random.Random(5)
    while len(done) < 2:
        one = chance.choice(steps)
        if next(one, None) is None:
            done.add(one)
    database.close()
    numbers = order(database_url, 2 * ROWS)
    assert set(numbers) == set(range(-ROWS // 2 + 1, ROWS))


def test_a_changed_file_is_read_anew_before_the_first_group_and_refused_after_it(
    folder: Path, database_url: str
) -> None:
    config = config_of(folder, database_url, tasks=f"{folder}/a.jsonl")
    (folder / "a.jsonl").write_text('{"n": 1}\n' * 500 + "nonsense\n")
    with pytest.raises(UserError, match=r"tasks: .*a\.jsonl line 501 is not JSON"):
        create_run(config, "key")
    (folder / "a.jsonl").write_text('{"n": 2}\n' * 500 + "nonsense\n")
    with pytest.raises(UserError, match="line 501"):
        create_run(config, "key")
    database = Database(database_url)
    with database.write() as conn:
        conn.execute(text("UPDATE runs SET data_cursor = 1"))
    database.close()
    (folder / "a.jsonl").write_text('{"n": 2}\n' * 501)
    with pytest.raises(ConfigError, match=r"tasks: .*a\.jsonl has changed since the run was created"):
        create_run(config, "key")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"path": "a.jsonl", "colums": {}}], "'tasks': .*source 0: unknown key 'colums'; did you mean 'columns'"),
        ({"path": "a.jsonl", "weight": -1}, "'tasks': .*weight: Input should be greater than 0"),
        (["a.jsonl", "b/a.jsonl"], "two sources are called 'a': give each a `name`"),
        ([], "give 1 to 64 sources"),
        ({"path": "a.jsonl", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "either `prompt` or"),
        ({"path": "a.jsonl", "messages": [{"role": "usr", "content": "x"}]}, "messages.0.role"),
        (7, "'tasks': .*give a path, a source with a `path`"),
        ("", "give a path"),
    ],
)
def test_an_invalid_source_is_refused_by_name(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"name": "r", "model": "tiny", "tasks": tasks})


def test_held_out_sources_have_no_weight() -> None:
    with pytest.raises(ConfigError, match="weight: only for training tasks"):
        parse_config({"name": "r", "model": "tiny", "evaluation": {"tasks": {"path": "a.jsonl", "weight": 2}}})


def test_a_source_with_too_small_a_weight_is_refused(folder: Path, database_url: str) -> None:
    sources = [{"path": f"{folder}/a.jsonl", "weight": 1e5}, f"{folder}/b.jsonl"]
    with pytest.raises(ConfigError, match="tasks: weight: the smallest"):
        create_run(config_of(folder, database_url, tasks=sources), "key")


def test_epochs_become_steps_when_all_tasks_are_stored(folder: Path, database_url: str, tiny_model: Path) -> None:
    settings = {"epochs": 2, "steps": 10, "trainer": {"groups_per_step": 64}, "model": str(tiny_model)}
    create_run(config_of(folder, database_url, **settings), "key")
    database = Database(database_url)
    steps = -(-2 * (ROWS + ROWS // 2) // 64)
    run = database.query(runs.by_name, "r")
    assert (run.target_steps, run.config["steps"], run.config["epochs"]) == (steps, steps, 2)
    written = load_config(folder / "runs" / "r" / "config.yaml")
    assert (written.steps, written.epochs) == (steps, 2)
    more = config_of(folder, database_url, **{**settings, "epochs": 3})
    run_id, status = open_run(database, more, tiny_model, "key")  # a resume
    assert (run_id, status, task_ingestion.with_steps(database, run_id, more).steps) == (
        run.id,
        "running",
        -(-3 * (ROWS + ROWS // 2) // 64),
    )
    fewer = config_of(folder, database_url, **{**settings, "epochs": 1})
    with pytest.raises(ConfigError, match="may only grow"):
        open_run(database, fewer, tiny_model, "key")
    database.close()


def test_epochs_need_tasks() -> None:
    with pytest.raises(ConfigError, match="epochs: needs `tasks`"):
        parse_config({"name": "r", "model": "tiny", "epochs": 1})


async def test_the_rest_is_stored_beside_the_run_and_a_cancelled_one_later(
    folder: Path, database_url: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, database_url, tasks=f"{folder}/a.jsonl", model=str(tiny_model))
    monkeypatch.setattr(task_rows.NewSource, "__init__", partialmethod(task_rows.NewSource.__init__, block=150))
    database = Database(database_url)
    run_id, _ = await asyncio.to_thread(open_run, database, config, tiny_model, "key")
    (source,) = database.query(task_rows.sources, run_id)
    assert (source.stored, source.block, source.complete) == (200, 150, False)  # the run may start
    cancelled = asyncio.create_task(task_ingestion.follow(database, run_id, config, print))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    notes: list[str] = []
    await task_ingestion.follow(database, run_id, config, notes.append)
    (source,) = database.query(task_rows.sources, run_id)
    assert (source.stored, source.complete) == (ROWS, True)
    assert notes[-1].startswith(f"all {ROWS:,} tasks are stored")
    before = list(notes)
    await task_ingestion.follow(database, run_id, config, notes.append)
    assert notes == before
    database.close()


@pytest.mark.long_on("postgresql")
async def test_a_source_without_end_is_stored_ahead_of_the_run_and_goes_on_where_it_stopped(
    folder: Path, database_url: str, endless: str
) -> None:
    config = config_of(folder, database_url, tasks={"path": endless, "ahead": BLOCK})
    database, quarter = Database(database_url), BLOCK // 4
    cursors = iter([(1, "running"), (BLOCK // 2, "running"), (BLOCK, "running"), (3 * BLOCK, "running")])
    waited: list[tuple[int, bool, bool]] = []

    def show(progress: task_ingestion.Progress) -> None:
        """When nothing is left to store, the run takes further tasks; at last it ends."""
        if progress.waits:
            waited.append((progress.stored // quarter, progress.usable, progress.complete))
            take(database, *next(cursors, (3 * BLOCK, "finished")))

    await asyncio.to_thread(create_run, config, "key", show)
    assert waited == [(quarters, True, False) for quarters in (4, 5, 6, 8, 16)]

    take(database, 4 * BLOCK - 1)
    noted, notes = asyncio.Event(), list[str]()
    loop = asyncio.get_running_loop()

    def note(line: str) -> None:
        notes.append(line)
        loop.call_soon_threadsafe(noted.set)

    run = database.query(runs.by_name, "r")
    following = asyncio.create_task(task_ingestion.follow(database, run.id, config, note))
    await noted.wait()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert notes == [f"{20 * quarter:,} tasks are stored; further ones follow as the run takes them (tasks.ahead)"]
    with database.read() as conn:
        for block in range(5):
            numbers = [
                task_rows.task_at(conn, run.id, cursor, run.seed).data["n"]
                for cursor in (block * BLOCK, block * BLOCK + 7, (block + 1) * BLOCK - 1)
            ]
            assert all(block * BLOCK <= number < (block + 1) * BLOCK for number in numbers)
        with pytest.raises(RequestError, match="not stored yet"):
            task_rows.task_at(conn, run.id, 5 * BLOCK, run.seed)
        assert not list(run_audit.scan(conn, run.id))
    database.close()


def test_a_source_that_is_smaller_and_one_without_bound_are_stored_wholly(
    folder: Path, database_url: str, endless: str
) -> None:
    sources = [
        {"path": f"{folder}/a.jsonl", "ahead": BLOCK},
        {"path": endless, "limit": 2 * BLOCK, "ahead": None, "name": "all"},
    ]
    seen: list[task_ingestion.Progress] = []
    create_run(config_of(folder, database_url, tasks=sources), "key", seen.append)
    assert (seen[-1].stored, seen[-1].complete, any(one.waits for one in seen)) == (ROWS + 2 * BLOCK, True, False)


@pytest.mark.long_on("postgresql")
def test_a_large_source_with_an_end_waits_beside_a_run_but_is_created_wholly(
    folder: Path, database_url: str, endless: str
) -> None:
    config = config_of(folder, database_url, tasks={"path": endless, "limit": 2 * BLOCK, "ahead": BLOCK})
    database = Database(database_url)
    with database.write() as conn:
        sources = task_ingestion.check(config)
        run_id = runs.create(conn, name="r", config={}, sources=sources, base_model="t", key="k", seed=0, steps=1)
    beside = task_ingestion.ingest(database, run_id, config)
    assert next(progress for progress in beside if progress.waits).stored == BLOCK
    whole = list(task_ingestion.ingest(database, run_id, config, only_endless_wait=True))
    assert (whole[-1].stored, whole[-1].complete) == (2 * BLOCK, True)
    assert next(beside).complete  # another process has stored the rest
    database.close()


def test_passes_count_all_tasks_so_all_are_stored(folder: Path, database_url: str, endless: str) -> None:
    tasks = {"path": endless, "limit": BLOCK + 10, "ahead": BLOCK}
    create_run(config_of(folder, database_url, tasks=tasks, epochs=1), "key")
    with Database(database_url).read() as conn:
        assert runs.by_name(conn, "r").target_steps == -(-(BLOCK + 10) // 8)


@pytest.mark.parametrize("ahead", [0, BLOCK - 1, 2**40, "all"])
def test_a_source_is_at_least_a_block_ahead(ahead: Any) -> None:
    assert task_sources.LEAST_AHEAD == BLOCK
    with pytest.raises(ConfigError, match="ahead"):
        parse_config({"name": "r", "model": "tiny", "tasks": {"path": "a.jsonl", "ahead": ahead}})
    with pytest.raises(ConfigError, match="ahead: only for training tasks"):
        parse_config({"name": "r", "model": "tiny", "evaluation": {"tasks": {"path": "a.jsonl", "ahead": None}}})


def test_an_ordered_source_is_stored_wholly_and_drawn_from_its_rising_window(folder: Path, database_url: str) -> None:
    (folder / "hard.jsonl").write_text("".join(f'{{"n": {n}, "level": {-n}}}\n' for n in range(200)))
    order = {"by": "level", "width": 0.1, "over": 50}
    seen: list[task_ingestion.Progress] = []
    create_run(
        config_of(folder, database_url, {"path": f"{folder}/hard.jsonl", "order": order, "ahead": 16384}),
        "key",
        seen.append,
    )
    assert [progress.usable for progress in seen] == [progress.complete for progress in seen]
    assert (seen[0].usable, seen[-1].usable, seen[-1].stored) == (False, True, 200)
    database = Database(database_url)
    with database.read() as conn:
        run = runs.by_name(conn, "r")
        drawn = [task_rows.draw(conn, run.id, cursor, run.seed) for cursor in range(450)]
        assert list(run_audit.scan(conn, run.id)) == []
    database.close()
    levels = [draw.task.data["level"] for draw in drawn]
    assert levels[0] < -179  # one of the 20 easiest
    assert min(levels[46:50]) > -38
    assert [draw.number_of_pass for draw in drawn] == [0] * 50 + [1] * 200 + [2] * 200
    assert sorted(levels[50:250]) == list(range(-199, 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": "a:tasks", "order": {"by": "level"}}, "`order` needs all tasks of a function: give a `limit`"),
        ({"path": "a.jsonl", "order": {"by": "level", "bye": 1}}, "unknown key 'order.bye'"),
        ({"path": "a.jsonl", "order": {"by": "level", "width": 0}}, "order.width.*greater than 0"),
    ],
)
def test_an_invalid_order_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"name": "r", "model": "tiny", "tasks": source})


def test_held_out_tasks_have_no_order() -> None:
    tasks = {"path": "a.jsonl", "order": {"by": "level"}}
    with pytest.raises(ConfigError, match="order: only for training tasks"):
        parse_config({"name": "r", "model": "tiny", "evaluation": {"tasks": tasks}})
