"""The supervisor of a placed run marks the run's folder before task runners may start."""

from __future__ import annotations

from typing import Any

import pytest
from run_records import create_run

from agentrl.configs.run_config import RunConfig
from agentrl.launch import placed_run
from agentrl.launch.run_lifecycle import Stopped
from agentrl.placement.folder_proof import check_token
from agentrl.placement.part_spec import PartSpec
from agentrl.store import Database, part_ranks


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
