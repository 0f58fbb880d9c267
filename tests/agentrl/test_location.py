"""A run's database is found by an option, the environment, or the run's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.errors import UserError
from agentrl.launch.run_folder import remember_database
from agentrl.location import Location, database_in, folders, locate, proxy_of

SECRET = "postgresql://me:secret@db/runs"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `runs/` with `counter`, started last, and `record`; `imitate` is of `agentrl sft`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for age_s, name in enumerate(("counter", "record", "imitate")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(f"name: {name}\n")
        os.utime(folder / "config.yaml", (1000 - age_s, 1000 - age_s))
        if name != "imitate":
            (folder / "agentrl.db").touch()
    return tmp_path / "runs"


def url(runs: Path, name: str) -> str:
    return f"sqlite:///{runs / name / 'agentrl.db'}"


@pytest.mark.parametrize("run", ["record", "runs/record", "runs/record/", "{runs}/record"])
def test_a_run_is_found_by_its_name_or_folder(runs: Path, run: str) -> None:
    found = locate(run.format(runs=runs), None, {})
    assert (found.name, found.database_url, found.note) == ("record", url(runs, "record"), None)


def test_a_run_in_the_current_folder_is_found(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    assert locate("record", None, {}).database_url == url(runs, "record")
    monkeypatch.chdir(runs / "record")
    assert locate(".", None, {}).name == "record"


def test_without_a_name_the_run_that_was_started_last_is_taken_and_named(runs: Path) -> None:
    found = locate(None, None, {})
    assert (found.name, found.database_url) == ("counter", url(runs, "counter"))
    assert found.note == "run counter, in runs/counter: the newest of 2; --run names another"
    os.utime(runs / "record" / "config.yaml")
    assert locate(None, None, {}).name == "record"
    (runs / "counter" / "agentrl.db").unlink()
    assert locate(None, None, {}).note == "run record, in runs/record"


def test_an_option_comes_before_the_environment_and_that_before_a_name(runs: Path) -> None:
    env = {"AGENTRL_DATABASE_URL": "sqlite:///env.db"}
    assert locate("record", "sqlite:///o.db", env) == Location(database_url="sqlite:///o.db", name="record")
    assert locate("runs/record", "sqlite:///o.db", env) == Location(database_url="sqlite:///o.db", name="record")
    assert locate("runs/record", None, env).database_url == url(runs, "record")
    by_env = locate("record", None, env)
    assert (by_env.database_url, by_env.name, by_env.by_environment) == ("sqlite:///env.db", "record", True)
    assert locate(None, None, env).name is None


def test_an_unknown_name_gets_the_nearest_and_the_list(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        locate("countr", None, {})
    assert str(refused.value) == f"no run 'countr' in {runs}; did you mean 'counter'? it holds counter, record"
    with pytest.raises(UserError, match=r"no run 'zzz' in .*/runs; it holds counter, record"):
        locate("zzz", None, {})
    with pytest.raises(UserError, match="runs/imitate has no run with a database"):
        locate("runs/imitate", None, {})
    with pytest.raises(UserError, match=r"which run\? .*/nothing has no runs"):
        locate(None, None, {}, Path("nothing"))
    assert [folder.name for folder in folders(runs)] == ["counter", "record"]


def test_a_run_in_another_database_is_found_and_its_password_is_not_stored(runs: Path) -> None:
    folder = runs / "record"
    remember_database(folder, SECRET)
    assert "secret" not in (folder / ".database").read_text()
    with pytest.raises(
        UserError, match=r"uses postgresql://me:\*\*\*@db/runs: set AGENTRL_DATABASE_URL, or set PGPASS"
    ):
        locate("record", None, {})
    assert database_in(folder, {"PGPASSWORD": "x"}) == "postgresql://me@db/runs"
    assert database_in(folder, {"AGENTRL_DATABASE_URL": SECRET}) == SECRET
    assert "secret" not in repr(locate("runs/record", None, {"AGENTRL_DATABASE_URL": SECRET}))
    (folder / "config.yaml").write_text(f"name: record\ndatabase_url: {SECRET}\n")
    assert locate("record", None, {}).database_url == SECRET
    remember_database(folder, "postgresql://me@db/runs")
    assert locate("record", None, {}).database_url == "postgresql://me@db/runs"


def test_a_file_is_recorded_by_its_whole_path_and_the_folders_own_is_not(runs: Path, tmp_path: Path) -> None:
    remember_database(runs / "record", "sqlite:///other.db")
    assert locate("record", None, {}).database_url == f"sqlite:///{tmp_path}/other.db"
    remember_database(runs / "record", url(runs, "record"))
    assert not (runs / "record" / ".database").exists()
    assert locate("record", None, {}).database_url == url(runs, "record")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: [", "expected the node content"),
        (b"name: \xff", "can't decode byte 0xff"),
        (b"name: 2026-13-01", "month must be in 1..12"),
        (None, "Is a directory"),
    ],
    ids=["cut", "not text", "a date", "a folder"],
)
def test_a_folder_whose_configuration_cannot_be_read_is_named(runs: Path, content: bytes | None, said: str) -> None:
    config = runs / "record" / "config.yaml"
    config.unlink()
    if content is None:
        config.mkdir()
    else:
        config.write_bytes(content)
    with pytest.raises(UserError, match=rf"^cannot read runs/record/config\.yaml: .*{said}") as caught:
        locate("runs/record", None, {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "- name\n", "name:\n"])
def test_a_configuration_without_a_name_leaves_the_run_its_folders_name(runs: Path, content: str) -> None:
    (runs / "record" / "config.yaml").write_text(content)
    assert locate("runs/record", None, {}).name == "record"


def test_the_proxy_of_an_active_run_is_read_from_its_folder(runs: Path) -> None:
    assert proxy_of(runs / "record") == {}
    (runs / "record" / "env").write_text("export AGENTRL_PROXY_URL=http://h:1\nexport AGENTRL_RUN_KEY='a=b c'\n")
    assert proxy_of(runs / "record") == {"AGENTRL_PROXY_URL": "http://h:1", "AGENTRL_RUN_KEY": "a=b c"}
    (runs / "record" / "env").unlink()
    (runs / "record" / "env").mkdir()
    with pytest.raises(UserError, match=r"cannot read .*/record/env: Is a directory"):
        proxy_of(runs / "record")
