"""`agentrl run create` and `agentrl proxy`: recorded programs, without training anything."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from forks import ran

from agentrl.client import Client
from agentrl.engine.server_process import free_port
from agentrl.location import locate
from agentrl.store import Database, runs, task_rows
from agentrl.store.db.codec import hash_key
from agentrl.testing import FakeEngine

AGENT = "agent: agentrl.agents.reverse:ReverseAgent\ntasks: agentrl.agents.reverse:train_tasks\n"


def agentrl(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AGENTRL_") or k == "AGENTRL_CACHE"}
    return ran([*args], clean | {"COLUMNS": "200"} | env, cwd)


def exports(text: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(.*)$", text, re.MULTILINE))


@contextmanager
def serving(cwd: Path, env: dict[str, str], engine: FakeEngine) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "agentrl", "proxy", "--run", "rec", "--engine", engine.url, "--port", str(port)]
    with subprocess.Popen(command, cwd=cwd, env=os.environ | env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("startup complete" in line for line in process.stderr)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()


def test_two_commands_record_an_external_program(tmp_path: Path, tiny_model: Path, fake_engine: FakeEngine) -> None:
    made = agentrl("run", "create", "--name", "rec", "--model", str(tiny_model), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    env = exports(made.stdout)
    assert list(env) == ["AGENTRL_RUN_KEY"]
    assert locate("rec", None, {}, tmp_path / "runs").database_url == f"sqlite:///{tmp_path}/runs/rec/agentrl.db"
    assert "agentrl proxy --run rec --engine" in made.stderr
    assert env["AGENTRL_RUN_KEY"] not in made.stderr
    with serving(tmp_path, env, fake_engine) as url, Client(url, env["AGENTRL_RUN_KEY"], timeout_s=20) as client:
        for _ in range(20):  # more than admission would give a run that is trained
            opened = client.request("POST", "/sessions", {"task": {"n": 1}})
        model = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        model.chat.completions.create(model="rec", messages=[{"role": "user", "content": "ab"}])
        path = f"/sessions/{opened['session_id']}"
        client.request("POST", f"{path}/reward", {"value": 1.0})
        assert client.request("POST", f"{path}/end", {}) == {"status": "completed", "interactions": 1}
        run = client.request("GET", "/api/run")
    assert (run["groups"]["ready"], run["trajectories"], run["steps"]) == (1, {"ready": 1}, 0)


def test_a_tokenizer_is_enough_to_record_and_the_engine_keeps_its_weights(
    tmp_path: Path, tiny_model: Path, fake_engine: FakeEngine
) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    trained = agentrl("run", "create", "--name", "r", "--model", str(folder), "steps=1", cwd=tmp_path)
    assert "no weights" in trained.stderr
    made = agentrl("run", "create", "--name", "rec", "--model", str(folder), cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    fake_engine.version, served = "default", fake_engine.model_path
    env = exports(made.stdout)
    with serving(tmp_path, env, fake_engine) as url, Client(url, env["AGENTRL_RUN_KEY"], timeout_s=20) as client:
        opened = client.request("POST", "/sessions", {})
        model = openai.OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
        model.chat.completions.create(model="rec", messages=[{"role": "user", "content": "ab"}])
    assert (fake_engine.version, fake_engine.model_path) == ("0", served)


def test_a_run_key_can_be_chosen(tmp_path: Path, tiny_model: Path) -> None:
    url = f"sqlite:///{tmp_path}/own.db"
    args = ("run", "create", "--name", "rec", "--model", str(tiny_model), "--database-url", url)
    made = agentrl(*args, cwd=tmp_path, AGENTRL_RUN_KEY="mine")
    assert made.stdout == "export AGENTRL_RUN_KEY=mine\n", made.stderr
    database = Database(url)
    with database.read() as conn:
        assert runs.by_name(conn, "rec").key_hash == hash_key("mine")
    database.close()
    again = agentrl(*args, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (2, "agentrl: a run named 'rec' already exists in this database\n")
    listed = agentrl("run", "list", "--database-url", url, cwd=tmp_path)
    assert re.search(r"rec +│ running +│ records only +│ 0 ", listed.stdout), listed.stdout


def test_a_config_makes_the_run_that_train_would(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"name: a\nmodel: {tiny_model}\nsteps: 3\n{AGENT}")
    made = agentrl("run", "create", "a.yaml", "seed=5", "--name", "b", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    database = Database(locate("b", None, {}, tmp_path / "runs").database_url)
    with database.read() as conn:
        run = runs.by_name(conn, "b")
        assert (run.seed, run.target_steps) == (5, 3)
        assert task_rows.task_at(conn, run.id, 0, run.seed).data
    database.close()
    assert (tmp_path / "runs" / "b" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give a config file, or --name and --model"),
        (("--name", "r"), "give a config file, or --name and --model"),
        (("nope.yaml",), "cannot read config nope.yaml"),
        (("--name", "r", "--model", "/no/such"), "model folder /no/such does not exist"),
        (("--name", "r", "--model", "tiny", "stepz=1"), "unknown config key 'stepz'; did you mean 'steps'?"),
        (("--name", "r", "--model", "tiny", "agent=a.b:C"), "agent: cannot import 'a.b'"),
        (("--name", "r", "--model", "tiny", "--key", "a b"), "a key consists of printable ASCII characters"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    done = agentrl("run", "create", *args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_train_names_the_missing_agent_and_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nmodel: tiny\n")
    done = agentrl("train", "a.yaml", cwd=tmp_path)
    assert done.stderr == (
        "agentrl: `agentrl train` needs agent and tasks in the config, to run the agent on the tasks\n"
    )


def test_a_run_that_has_failed_is_reopened_by_its_name(tmp_path: Path, tiny_model: Path) -> None:
    made = agentrl("run", "create", "--name", "rec", "--model", str(tiny_model), cwd=tmp_path)
    env = exports(made.stdout)
    database = Database(locate("rec", None, {}, tmp_path / "runs").database_url)
    with database.write() as conn:
        runs.set_status(conn, runs.by_name(conn, "rec").id, "failed", "9 sessions in a row failed")
    done = agentrl("run", "reopen", "rec", cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (0, "run rec admits groups again\n")
    with database.read() as conn:
        row = runs.by_name(conn, "rec")
        assert (row.status, row.error, row.finished_at) == ("running", None, None)
    database.close()
    unknown = agentrl("run", "reopen", "rex", cwd=tmp_path, **env)
    assert (unknown.returncode, "did you mean 'rec'" in unknown.stderr) == (2, True)
