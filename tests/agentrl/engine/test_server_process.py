"""Command lines of servers, and ports for them."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.engine import server_process
from agentrl.engine.server_process import EngineSpec
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


def test_room_for_adapters_is_made_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    def options(**settings: Any) -> list[str]:
        argv = server_process.argv(EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", **settings))
        return [argument for argument in argv if "lora" in argument or argument.endswith("_proj")]

    assert options() == []
    rank = ["--max-lora-rank", "--lora-backend", "--enable-lora", "--lora-target-modules"]
    assert options(lora_rank=4, lora_targets=("self_attn.q_proj", "o_proj")) == [*rank, "o_proj", "q_proj"]
    on_gpu = options(lora_rank=4, device="cuda")  # SGLang's own choice of a backend
    assert on_gpu[:4] == ["--max-lora-rank", "--enable-lora", "--lora-target-modules", "down_proj"]


def test_a_seed_reaches_the_server(tiny_model: Path, tmp_path: Path) -> None:
    def seed(**settings: Any) -> list[str]:
        argv = server_process.argv(EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", **settings))
        return argv[argv.index("--random-seed") :][:2] if "--random-seed" in argv else []

    assert (seed(), seed(seed=0), seed(seed=7)) == ([], ["--random-seed", "0"], ["--random-seed", "7"])


def test_a_server_reports_experts_where_it_is_asked_to(tiny_model: Path, tmp_path: Path) -> None:
    for asked in (False, True):
        spec = EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", routed_experts=asked)
        assert ("--enable-return-routed-experts" in server_process.argv(spec)) == asked


def test_a_run_that_replays_routing_asks_its_engines_for_experts(tiny_model: Path, tmp_path: Path) -> None:
    run = RunConfig(name="r", model="m", agent="a:B", tasks="t", trainer={"routing_replay": "engine"})
    with pytest.raises(ModelFolderError, match="has no experts"):
        engine_spec(run, tiny_model, 0, port=1, log_file=tmp_path / "log")
    sizes = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert engine_spec(run, tmp_path, 0, port=1, log_file=tmp_path / "log").routed_experts
