"""The text of trajectories is written beside a run, if its configuration says so, and never stops it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import Databases
from history import History

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.errors import UserError
from agentrl.export.trajectory_log import TrajectoryLog
from agentrl.launch.views import log_follower
from agentrl.store import Database


@pytest.fixture
def history(databases: Databases, tiny_model: Path) -> Iterator[History]:
    with databases.lent("sqlite") as url:
        database = Database(url)
        yield History(database, base_model=str(tiny_model))
        database.close()


def config(tmp_path: Path, *, dump: bool = True) -> RunConfig:
    found = parse_config(
        {"name": "r", "model": "tiny", "agent": "a:B", "runs_dir": str(tmp_path), "rollout": {"dump_to_file": dump}}
    )
    found.run_dir.mkdir()
    return found


def written(tmp_path: Path) -> set[str]:
    return {file.stem for file in tmp_path.rglob("*.jsonl")}


async def test_groups_are_written_while_the_run_goes_on(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "POLL_S", 0.01)
    done = asyncio.Event()
    loop = asyncio.get_running_loop()
    catch_up = TrajectoryLog.catch_up

    def and_tell(log: TrajectoryLog, *args: Any) -> int:
        count = catch_up(log, *args)
        if count:
            loop.call_soon_threadsafe(done.set)
        return count

    monkeypatch.setattr(TrajectoryLog, "catch_up", and_tell)
    following = asyncio.create_task(log_follower.follow(config(tmp_path), history.db, history.run_id, print))
    expected = set()
    for _ in range(2):
        expected.add((await asyncio.to_thread(history.group)).group_id)
        await asyncio.wait_for(done.wait(), 60)
        done.clear()
        assert written(tmp_path) == expected
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following


async def test_a_log_that_is_not_wanted_is_not_written(history: History, tmp_path: Path) -> None:
    settings = config(tmp_path, dump=False)
    history.group()
    await log_follower.follow(settings, history.db, history.run_id, print)
    log_follower.finish(settings, history.db, history.run_id, print)
    log_follower.check(settings, tmp_path)
    assert written(tmp_path) == set()


async def test_a_disk_that_cannot_be_written_is_noted_once_and_written_later(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_follower, "POLL_S", 0.01)
    notes: list[str] = []
    tries, loop, tried = 0, asyncio.get_running_loop(), asyncio.Event()

    def fails(log: TrajectoryLog, *args: Any) -> int:
        nonlocal tries
        tries += 1
        if tries == 3:
            loop.call_soon_threadsafe(tried.set)
        raise OSError(5, "Input/output error")

    settings = config(tmp_path)
    history.group()
    with monkeypatch.context() as broken:
        broken.setattr(TrajectoryLog, "catch_up", fails)
        following = asyncio.create_task(log_follower.follow(settings, history.db, history.run_id, notes.append))
        await asyncio.wait_for(tried.wait(), 60)
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
        log_follower.finish(settings, history.db, history.run_id, notes.append)
    assert len(notes) == 2
    assert set(notes) == {
        "rollout.dump_to_file: [Errno 5] Input/output error; the groups are written when that is over"
    }
    log_follower.finish(settings, history.db, history.run_id, notes.append)
    assert len(written(tmp_path)) == 1


def test_a_model_without_a_tokenizer_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.dump_to_file: .* has no tokenizer.json"):
        log_follower.check(config(tmp_path), tmp_path)
