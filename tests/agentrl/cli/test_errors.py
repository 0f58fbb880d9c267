"""Bad input: one line that names the field, status 2, never a traceback."""

import os
import socket
from pathlib import Path

import pytest
from forks import ran

from agentrl.store import Database

CONFIG = (
    "name: x\nmodel: {model}\nagent: agentrl.agents.reverse:ReverseAgent\ntasks: agentrl.agents.reverse:train_tasks\n"
)


def agentrl(*args: str, cwd: Path) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("AGENTRL_")}
    done = ran([*args], env, cwd)
    return done.returncode, done.stderr


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(model=tiny_model))
    return path


@pytest.fixture
def taken_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "nope.yaml"], "cannot read config nope.yaml"),
        (["train", "config.yaml", "trainer.lrr=1"], "unknown config key 'trainer.lrr'; did you mean 'lr'?"),
        (["train", "config.yaml", "trainer.lr=-1"], "'trainer.lr'"),
        (["train", "config.yaml", "model=/no/such/folder"], "model folder /no/such/folder does not exist"),
        (["train", "config.yaml", "model=smolm2"], "did you mean 'smollm2'?"),
        (["train", "config.yaml", "agent=agentrl.agents.reverse:ReverseAgnt"], "did you mean 'ReverseAgent'?"),
        (["train", "config.yaml", "tasks=nope.jsonl"], "cannot read nope.jsonl"),
        (["train", "config.yaml", "database_url=mysql://x/y"], "only sqlite and postgresql are supported"),
        (["engine", "--model", "/no/such/folder", "--port", "0"], "model folder /no/such/folder does not exist"),
        (
            [
                "proxy",
                "--run",
                "x",
                "--engine",
                "http://localhost:1",
                "--database-url",
                "sqlite:///empty.db",
                "--port",
                "0",
            ],
            "db upgrade",
        ),
        (
            [
                "proxy",
                "--run",
                "x",
                "--engine",
                "http://localhost:1",
                "--database-url",
                "sqlite:///a.db",
                "--host",
                "0.0.0.0",
            ],
            "ADMIN_KEY",
        ),
        (["trainer", "--config", "config.yaml"], "AGENTRL_PROXY_URL is not set"),
        (["rollout", "--config", "config.yaml"], "AGENTRL_PROXY_URL"),
        (["model", "nope"], "choose from smollm2, tiny"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_a_user_error_is_one_line_with_exit_status_2(config, args, message):
    status, stderr = agentrl(*args, cwd=config.parent)
    assert status == 2, stderr
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1, stderr


@pytest.mark.parametrize("command", ["proxy", "engine", "train"])
def test_a_port_in_use_is_named(config, taken_port, command, tiny_model):
    args = {
        "proxy": [
            "proxy",
            "--run",
            "x",
            "--engine",
            "http://localhost:1",
            "--database-url",
            "sqlite:///a.db",
            "--port",
            str(taken_port),
        ],
        "engine": ["engine", "--model", str(tiny_model), "--port", str(taken_port)],
        "train": ["train", "config.yaml", f"proxy.port={taken_port}"],
    }[command]
    status, stderr = agentrl(*args, cwd=config.parent)
    assert (status, stderr.strip()) == (2, f"agentrl: cannot listen on 127.0.0.1:{taken_port}: Address already in use")


def test_an_unknown_run_names_the_known_ones(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/s.db")
    database.upgrade()
    database.close()
    status, stderr = agentrl("store", "check", "--run", "x", "--database-url", database.url, cwd=tmp_path)
    assert (status, stderr.strip()) == (
        2,
        "agentrl: no run named 'x'; the database holds no run (`agentrl run create` makes one)",
    )
