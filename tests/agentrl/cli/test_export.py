"""`agentrl export` and `agentrl store`: options that do not go together are refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_records import create_run
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.configs.config_files import parse_config
from agentrl.errors import UserError
from agentrl.store import Database

CONFIG = parse_config({"name": "test", "model": "tiny", "agent": "a:B", "tasks": "t"}).model_dump(mode="json")


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    made = Database(f"sqlite:///{tmp_path}/store.db")
    made.upgrade()
    with made.write() as conn:
        create_run(conn, config=CONFIG, base_model=tmp_path / "moved")
    yield made
    made.close()


def refused(database: Database, *arguments: object) -> str:
    """The message with which the command refuses to write."""
    words = [*map(str, arguments), "--database-url", database.url]
    with pytest.raises(UserError) as said:
        CliRunner().invoke(app, words, catch_exceptions=False)
    return str(said.value)


@pytest.mark.parametrize(
    "options",
    [["--checkpoint", "latest"], ["--checkpoint", "latest", "--to", "a", "--out", "b"]],
    ids=["no folder", "a file too"],
)
def test_a_checkpoint_needs_a_folder_alone(database: Database, options: list[str]) -> None:
    assert refused(database, "export", *options) == "--checkpoint needs --to FOLDER, and no --out"


@pytest.mark.parametrize("options", [[], ["--to", "a"], ["--out", "b", "--to", "a"]])
def test_rows_need_a_file_alone(database: Database, options: list[str]) -> None:
    said = refused(database, "export", *options)
    assert said == "give --out FILE for rows, or --checkpoint STEP --to FOLDER for a model"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--format", "csv"], "--format"),
        (["--what", "session"], "--what"),
        (["--steps", "7..3"], "--steps"),
        (["--state", "trainde"], "--state"),
    ],
)
def test_an_unknown_choice_is_named(database: Database, tmp_path: Path, options: list[str], said: str) -> None:
    assert said in refused(database, "export", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_base_model_that_has_moved_can_be_given(database: Database, tmp_path: Path) -> None:
    checkpoint = ("export", "--run", "test", "--checkpoint", "3", "--to", tmp_path / "out")
    said = refused(database, *checkpoint)
    assert said == f"the run's base model {tmp_path}/moved is not on this machine: give its folder with --model"
    (tmp_path / "here").mkdir()
    said = refused(database, *checkpoint, "--model", tmp_path / "here")
    assert said.startswith("--checkpoint 3: ")
    assert said.endswith("has no checkpoint of the run")


@pytest.mark.parametrize("options", [[], ["--older-than", "7d", "--keep-steps", "3"]], ids=["none", "both"])
def test_pruning_has_one_limit(database: Database, options: list[str]) -> None:
    said = refused(database, "store", "prune", "--run", "test", *options)
    assert said == "give either --older-than or --keep-steps"


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1y", "1,5h", ""])
def test_an_age_has_a_number_and_a_unit(database: Database, age: str) -> None:
    said = refused(database, "store", "prune", "--run", "test", f"--older-than={age}")
    assert said == f"--older-than: {age!r} is not an age; give a number and a unit (s, m, h, d, w), e.g. 7d"
