"""The supervisor of a placed run: it marks the run's folder before task runners may start, and ends by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_records import create_run

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.errors import AgentRLError
from agentrl.launch import placed_run
from agentrl.launch.run_lifecycle import Detached, Stopped, outcome_recorded
from agentrl.launch.views.live_panel import Display
from agentrl.placement import runner_watch
from agentrl.placement.folder_proof import check_token
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.placed_elsewhere import PlacedElsewhere
from agentrl.placement.scheduler import RunnerState, SchedulerUnavailable
from agentrl.store import Database, events, part_ranks, runs


class Scheduler:
    """Looks at the parts that the database wants when task runners may start, and starts none."""

    def __init__(self, database: Database, run_id: str) -> None:
        self.database, self.run_id = database, run_id
        self.tokens: list[str] = []

    def apply(self, parts: list[PartSpec]) -> None:
        for part in parts:
            row = self.database.query(part_ranks.find, self.run_id, part.name)
            self.tokens.append(row.spec["folder_token"])
        raise Stopped("for the test")


def test_every_part_gets_the_token_of_the_folder_before_it_is_placed(tmp_path, database_url):
    database = Database(database_url)
    with database.write() as conn:
        run_id = create_run(conn, name="placed", task_data=[{}], steps=10)
    config = RunConfig(name="placed", model="tiny", runs_dir=tmp_path)
    config.run_dir.mkdir()
    specs = [PartSpec(name=name, argv=("true",)) for name in ("proxy", "trainer")]
    scheduler: Any = Scheduler(database, run_id)
    for _ in range(2):
        with pytest.raises(Stopped):
            placed_run.begin(database, run_id, scheduler, specs, config.run_dir)
    database.close()
    first, same, second, again = scheduler.tokens
    assert (first, second) == (same, again)
    assert first != second
    check_token(config.run_dir, first)
    check_token(config.run_dir, second)


@pytest.fixture
def terminated(tmp_path: Path, database_url: str):
    """Ends a supervisor by SIGTERM: the database, the run's id, and what it raised."""
    database = Database(database_url)

    def end(moves_supervisor: bool) -> tuple[Database, str, Stopped]:
        config = RunConfig(name="placed", model="tiny", runs_dir=tmp_path)
        with database.write() as conn:
            run_id = create_run(conn, name="placed", task_data=[{}], steps=10)
        placement = PlacedElsewhere(tmp_path / "placed", moves_supervisor=moves_supervisor)
        placed_run.begin(database, run_id, placement, [PartSpec(name="trainer", argv=("true",))], tmp_path)

        async def supervise() -> None:
            asyncio.get_running_loop().call_later(0, os.kill, os.getpid(), signal.SIGTERM)
            await placed_run._main(config, database, run_id, placement, display)

        with (
            Display(config, Console(quiet=True)) as display,
            pytest.raises(Stopped) as raised,
            outcome_recorded(database, run_id),
        ):
            asyncio.run(supervise())
        return database, run_id, raised.value

    yield end
    database.close()


Ended = Callable[[bool], tuple[Database, str, Stopped]]


def test_sigterm_stops_all_parts(terminated: Ended, tmp_path: Path) -> None:
    database, run_id, _ = terminated(False)
    assert database.query(part_ranks.order, run_id, "trainer").wanted == "stopped"
    assert database.query(runs.get, run_id).status == "paused"
    assert not (tmp_path / "placed").exists()


def test_sigterm_leaves_all_parts_where_the_supervisor_is_moved(terminated: Ended, tmp_path: Path) -> None:
    database, run_id, problem = terminated(True)
    assert isinstance(problem, Detached)
    assert database.query(part_ranks.order, run_id, "trainer").wanted == "running"
    assert database.query(runs.get, run_id).status == "running"
    assert database.query(events.of_run, run_id, "stopped") == []
    assert (tmp_path / "placed").exists()


class Cluster(PlacedElsewhere):
    """A scheduler whose runners of `engine-0` refuse their input once more at each look; `fails`: at the first look."""

    def __init__(self, file: Path, *, fails: bool) -> None:
        super().__init__(file)
        self.looks = -1 if fails else 0

    def states(self) -> list[RunnerState]:
        self.looks += 1
        if not self.looks:
            raise SchedulerUnavailable("Ray does not answer")
        why = "host h does not see /runs/placed/.secrets"
        return [
            RunnerState("engine-0", 0, "placed", host="h", reason=why, refusals=self.looks),
            RunnerState("trainer", 0, "placed", host="h", reason="its runner ended with status 1: away"),
            RunnerState("proxy", 0, "waiting", reason="Ray: PENDING"),
        ]


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_after_max_restarts_with_the_reason_of_a_host_whose_runner_refuses_its_input(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(runner_watch, "ASK_S", 0.0)
    database = Database(database_url)
    config = RunConfig(name="placed", model="tiny", runs_dir=tmp_path, max_restarts=3)
    with database.write() as conn:
        run_id = create_run(conn, name="placed", task_data=[{}], steps=10)
    cluster = Cluster(tmp_path / "placed", fails=fails)
    specs = [PartSpec(name=name, argv=("true",), ends=name == "trainer") for name in ("engine-0", "proxy", "trainer")]
    placed_run.begin(database, run_id, cluster, specs, tmp_path)
    with (
        Display(config, Console()) as display,
        pytest.raises(AgentRLError, match=r"^host h does not see /runs/placed/\.secrets$"),
        outcome_recorded(database, run_id),
    ):
        asyncio.run(placed_run._main(config, database, run_id, cluster, display))
    run = database.query(runs.get, run_id)
    database.close()
    assert (run.status, run.error) == ("failed", "host h does not see /runs/placed/.secrets")
    assert cluster.looks > config.max_restarts
    said = capsys.readouterr().out
    assert said.count("engine-0/0 on h: host h does not see /runs/placed/.secrets") == 1
    assert said.count("trainer/0 on h: its runner ended with status 1: away") == 1
    assert "proxy" not in said
    assert said.count("Ray does not answer") == fails
