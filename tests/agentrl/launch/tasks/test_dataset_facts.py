"""What a run's datasets in object storage contain is recorded, and a changed evaluation is refused on resume."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from run_records import create_run

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.launch.tasks import dataset_facts
from agentrl.store import Database, events

ONE, OTHER = '{"n": 1}\n', '{"n": 2}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train.jsonl", "held.jsonl"):
        (tmp_path / name).write_text(ONE)
    return tmp_path


def config_of(folder: Path) -> RunConfig:
    evaluation = {"tasks": f"file://{folder}/held.jsonl", "unseen_tasks": f"{folder}/held.jsonl"}
    storage = {"cache_dir": f"{folder}/cache"}
    tasks = f"file://{folder}/train.jsonl"
    return parse_config({"name": "r", "model": "tiny", "tasks": tasks, "evaluation": evaluation, "storage": storage})


def test_datasets_are_recorded_and_a_changed_evaluation_is_refused(folder, database_url):
    database = Database(database_url)
    config = config_of(folder)
    found = dataset_facts.facts_of(config)
    with database.write() as conn:
        run_id = create_run(conn, task_data=[{}], steps=10)
        dataset_facts.record(conn, run_id, found)
    (event,) = database.query(events.of_run, run_id, "datasets")
    sha256 = hashlib.sha256(ONE.encode()).hexdigest()
    assert {key: (facts["sha256"], facts["size_bytes"]) for key, facts in event.data.items()} == {
        "tasks": (sha256, 9),
        "evaluation.tasks": (sha256, 9),
    }
    (folder / "train.jsonl").write_text(OTHER)  # the database has the tasks
    database.query(dataset_facts.check_unchanged, run_id, dataset_facts.facts_of(config))
    (folder / "held.jsonl").write_text(OTHER)
    with pytest.raises(ConfigError, match=rf"evaluation\.tasks: file://.*held\.jsonl has changed .*was {sha256}, now"):
        database.query(dataset_facts.check_unchanged, run_id, dataset_facts.facts_of(config))
    database.close()


def test_a_run_without_remote_datasets_records_nothing(database_url):
    database = Database(database_url)
    with database.write() as conn:
        run_id = create_run(conn, task_data=[{}], steps=10)
        dataset_facts.record(conn, run_id, dataset_facts.facts_of(parse_config({"name": "r", "model": "tiny"})))
    assert database.query(events.of_run, run_id, "datasets") == []
    database.query(dataset_facts.check_unchanged, run_id, {})
    database.close()
