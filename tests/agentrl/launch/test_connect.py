"""A run that is on can be found: its keys, an address that stays, a file that only its owner reads."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError, UserError
from agentrl.launch import connect
from agentrl.launch.parts import Plan


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    made = parse_config({"name": "r", "model": "tiny", "runs_dir": str(tmp_path)})
    made.run_dir.mkdir()
    return made


def test_keys_come_from_the_environment() -> None:
    assert connect.choose_keys({"AGENTRL_ADMIN_KEY": "a", "AGENTRL_RUN_KEY": "r"}) == ("a", "r")


def test_keys_that_are_not_given_are_made_up() -> None:
    admin, run = connect.choose_keys({"AGENTRL_RUN_KEY": ""})
    assert admin.startswith("arl-admin-")
    assert run.startswith("arl-run-")
    assert connect.choose_keys({}) != (admin, run)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"AGENTRL_ADMIN_KEY": "k3y", "AGENTRL_RUN_KEY": "k3y"},
            "AGENTRL_ADMIN_KEY and AGENTRL_RUN_KEY must differ",
        ),
        ({"AGENTRL_RUN_KEY": "two words"}, "AGENTRL_RUN_KEY: a key consists of printable ASCII"),
        ({"AGENTRL_ADMIN_KEY": "schlüssel"}, "AGENTRL_ADMIN_KEY: a key consists of printable ASCII"),
    ],
)
def test_invalid_keys_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        connect.choose_keys(env)
    assert not any(key in str(caught.value) for key in env.values())


def test_a_resumed_run_keeps_its_proxy_where_it_was(config: RunConfig) -> None:
    first, _, _ = connect.choose_ports(config)
    again, engines, note = connect.choose_ports(config)
    assert (again, note) == (first, None)
    assert first not in engines


def test_the_proxy_moves_from_a_taken_port_with_a_note(config: RunConfig) -> None:
    first, _, _ = connect.choose_ports(config)
    with socket.socket() as other:
        other.bind(("127.0.0.1", first))
        other.listen()
        moved, _, note = connect.choose_ports(config)
    assert moved != first
    assert note is not None
    assert f"the proxy's previous port {first} is in use: it moved to {moved}" in note
    assert connect.choose_ports(config)[0] == moved


def test_a_configured_port_is_never_given_up(config: RunConfig) -> None:
    connect.choose_ports(config)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        fixed = config.model_copy(update={"proxy": config.proxy.model_copy(update={"port": taken})})
        with pytest.raises(UserError, match="Address already in use"):
            connect.choose_ports(fixed)
    assert connect.choose_ports(fixed)[0] == taken


@pytest.mark.parametrize("content", ["", "99999999", "x", "-1"])
def test_an_invalid_port_file_is_ignored(config: RunConfig, content: str) -> None:
    (config.run_dir / connect.PORT_FILE).write_text(content)
    port, _, note = connect.choose_ports(config)
    assert 0 < port < 65536
    assert note is None


def test_the_env_file_is_its_owners_alone_and_ends_with_the_run(config: RunConfig) -> None:
    plan = Plan(
        config=config,
        model=Path("m"),
        database_url="sqlite://",
        admin_key="the-admin-key",
        run_key="it's; $x",
        proxy_port=81,
        engine_ports=(),
    )
    stale = config.run_dir / "env"
    stale.write_text("of a killed run")
    stale.chmod(0o644)
    with connect.env_file(plan) as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert "the-admin-key" not in path.read_text()
        shell = f'. {path}; printf "%s %s" "$AGENTRL_PROXY_URL" "$AGENTRL_RUN_KEY"'
        env = {"PATH": os.environ["PATH"]}
        assert subprocess.check_output(["sh", "-c", shell], env=env, text=True) == "http://127.0.0.1:81 it's; $x"
    assert not path.exists()
