"""Command lines of servers, and ports for them."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.engine import server_process
from agentrl.errors import ModelFolderError, UserError
from agentrl.launch.engine_specs import engine_spec


@pytest.mark.parametrize(
    ("given", "below"),
    [("32768\t60999\n", 32_768), ("15000 65535", 15_000), (None, server_process.USUAL_FIRST_EPHEMERAL)],
)
def test_a_free_port_is_below_the_ephemeral_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, below: int
) -> None:
    if given is not None:
        (tmp_path / "range").write_text(given)
    monkeypatch.setattr(server_process, "EPHEMERAL_RANGE_FILE", tmp_path / "range")
    for _ in range(20):
        port = server_process.free_port()
        assert server_process.FIRST_PORT <= port < below
        server_process.check_port("127.0.0.1", port)


def test_a_free_port_is_found_when_every_port_is_ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text("1024 65535")
    monkeypatch.setattr(server_process, "EPHEMERAL_RANGE_FILE", tmp_path / "range")
    server_process.check_port("127.0.0.1", server_process.free_port())


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        port = used.getsockname()[1]
        monkeypatch.setattr(server_process, "_ports_to_choose", lambda: [port])
        with pytest.raises(UserError, match=r"no free port on "):
            server_process.free_port()
        monkeypatch.setattr(server_process, "_ports_to_choose", lambda: [port, 0, port])
        assert all(server_process.free_port() != port for _ in range(20))


def test_an_address_of_another_host_is_refused_at_once() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        server_process.free_port("192.0.2.1")


def test_a_run_that_replays_routing_asks_its_engines_for_experts(tiny_model: Path, tmp_path: Path) -> None:
    run = RunConfig(name="r", model="m", agent="a:B", tasks="t", trainer={"routing_replay": "engine"})
    with pytest.raises(ModelFolderError, match="has no experts"):
        engine_spec(run, tiny_model, 0, port=1, log_file=tmp_path / "log")
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert engine_spec(run, tmp_path, 0, port=1, log_file=tmp_path / "log").routed_experts
