"""`agentrl engine` and `agentrl model`: what they refuse, in one line, and what they print."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from forks import ran

from agentrl.cli.engine import create_key_file
from agentrl.engine.engine_keys import derived_key
from agentrl.environment import ADMIN_KEY, ENGINE_KEY
from agentrl.testing import FakeEngine, FakeVLLM


def agentrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ran([*arguments], os.environ)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "tinny"], "did you mean 'tiny'"),
        (["engine", "--model", "/absent", "--port", "0"], "/absent does not exist"),
        (["engine", "--model", "smollm", "--port", "0"], "did you mean 'smollm2'"),
        (["engine", "--model", "tiny", "--port", "0", "--version", "3"], "--weights and --version go together"),
        (["engine", "--model", "tiny", "--port", "0", "--backend", "vllm", "--deterministic"], "engine.deterministic:"),
        (["engine", "--model", "tiny", "--port", "0", "--advertise", "http://h"], "--advertise needs --join"),
        (["engine", "--model", "tiny", "--port", "0", "--join", "http://h"], "--join needs the proxy's admin key in"),
        (["engine"], "give --model, or --config"),
        (["engine", "--model", "tiny", "check", "http://h"], "--model: not an option of `agentrl engine check`"),
        (["engine", "check", "http://user:secret@h"], "AGENTRL_ENGINE_KEY"),
        (["engine", "check", "triton+http://h"], "names the backend 'triton'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    done = agentrl(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_engine_that_would_have_to_take_turns_with_a_trainer_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("{name: r, model: tiny, agent: 'm:A', tasks: 'm:t', resources: {colocated: true}}")
    for more in ([], ["--join", "http://127.0.0.1:9"]):
        done = agentrl("engine", "--config", str(config), "--port", "0", *more)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "agentrl: resources.colocated: `agentrl engine` does not know when the trainer has the GPUs' memory: let "
            "`agentrl train` start the engines, or set resources.divide_memory: true\n"
        )


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = agentrl("engine", "--model", "tiny", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == f"agentrl: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_check_examines_an_engine_and_its_exit_status_says_whether_it_is_ready() -> None:
    with FakeVLLM(key="k") as engine:
        address = f"vllm+{engine.url}"
        without = agentrl("engine", "check", address)
        ready = ran(["engine", "check", address], os.environ | {ENGINE_KEY: "k"})
        found = ran(["engine", "check", engine.url, "--json"], os.environ | {ENGINE_KEY: "k"})
    assert (without.returncode, without.stderr) == (1, "")
    assert "not ready for training\n✗ it requires its key: set AGENTRL_ENGINE_KEY\n" in without.stdout
    assert (ready.returncode, ready.stderr) == (0, "")
    assert "\nready for training\n" in ready.stdout
    assert json.loads(found.stdout)["backend"] == "vllm"


def test_check_derives_the_key_of_an_engine_that_joined() -> None:
    with FakeEngine() as engine:
        engine.key = derived_key("admin", engine.url)
        done = ran(["engine", "check", engine.url], os.environ | {ADMIN_KEY: "admin"})
    assert done.returncode == 0, done.stdout


def test_model_prints_the_folder(tiny_model: Path) -> None:
    done = agentrl("model", "tiny")
    assert (done.returncode, done.stdout) == (0, f"{tiny_model}\n")


def test_each_start_creates_a_new_private_key_file(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "engine-1.key"
    first, second = create_key_file(path), create_key_file(path)
    assert first != second == path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
