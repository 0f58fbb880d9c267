"""vLLM's command line and environment."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.vllm import vllm_command
from agentrl.engine.vllm.vllm_command import PYTHON, argv, environment, vllm_python
from agentrl.environment import ENGINE_KEY
from agentrl.errors import UserError


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    monkeypatch.setenv(PYTHON, "/vllm/python")
    return EngineSpec(backend="vllm", model=tmp_path, port=30000, log_file=tmp_path / "engine.log", key="a-key")


def option(line: list[str], name: str) -> str | None:
    return line[line.index(name) + 1] if name in line else None


def test_argv_serves_base_weights_under_a_number_and_lets_extra_arguments_win(spec: EngineSpec) -> None:
    line = argv(replace(spec, extra_args=("--dtype", "bfloat16"), seed=7))
    assert line[:3] == ["/vllm/python", "-m", "agentrl.engine.vllm.keyed_vllm"]
    assert line[-2:] == ["--dtype", "bfloat16"]
    assert {name: option(line, name) for name in ("--weight-version", "--seed", "--logprobs-mode")} == {
        "--weight-version": "0",
        "--seed": "7",
        "--logprobs-mode": "processed_logprobs",
    }
    assert "a-key" not in line


def test_a_cpu_engine_has_a_cache_of_whole_blocks_and_one_more_and_compiles_nothing(spec: EngineSpec) -> None:
    line = argv(replace(spec, max_total_tokens=1000))
    assert option(line, "--num-gpu-blocks-override") == "9"
    assert "--enforce-eager" in line
    on_gpu = argv(replace(spec, device="cuda", memory_fraction=0.5))
    assert option(on_gpu, "--gpu-memory-utilization") == "0.5"
    assert not {"--enforce-eager", "--num-gpu-blocks-override", "--kv-cache-memory-bytes"} & set(on_gpu)


def test_engines_without_a_seed_have_different_ones(spec: EngineSpec) -> None:
    assert option(argv(spec), "--seed") != option(argv(spec), "--seed")


def test_room_for_adapters_is_made_at_the_start(spec: EngineSpec) -> None:
    assert option(argv(replace(spec, lora_rank=9)), "--max-lora-rank") == "16"
    assert environment(replace(spec, lora_rank=9))["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in argv(spec)
    with pytest.raises(UserError, match=r"trainer\.lora\.rank"):
        argv(replace(spec, lora_rank=1000))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline": 2}, r"resources\.engines"),
        ({"hosts": 2}, r"resources\.engines"),
        ({"deterministic": True}, r"engine\.deterministic"),
        ({"routed_experts": True}, r"trainer\.routing_replay"),
        ({"memory_saver": True}, r"resources\.colocated"),
    ],
)
def test_what_vllm_engines_do_not_do_is_refused_by_the_name_of_its_setting(
    spec: EngineSpec, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        argv(replace(spec, **settings))


def test_the_key_is_in_the_environment_alone(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    before = dict(os.environ)
    env = environment(spec)
    assert (env[ENGINE_KEY], env.get("VLLM_API_KEY"), env["HF_HUB_OFFLINE"]) == ("a-key", None, "1")
    assert dict(os.environ) == before


def test_the_python_of_vllm_is_found_or_the_command_that_makes_it_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr(vllm_command, "CHECKOUT", tmp_path)
    with pytest.raises(UserError, match="make setup-vllm"):
        vllm_python()
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert vllm_python() == str(own)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert vllm_python() == sys.executable
