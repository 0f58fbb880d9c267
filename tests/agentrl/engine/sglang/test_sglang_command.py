"""SGLang's command line and environment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs.run_config import RunConfig
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.sglang.sglang_command import argv, environment
from agentrl.launch.engine_specs import engine_spec


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(model=tmp_path, port=30000, log_file=tmp_path / "engine.log")


def test_argv_serves_base_weights_under_a_number_and_lets_extra_arguments_win(spec: EngineSpec) -> None:
    line = argv(replace(spec, extra_args=("--max-total-tokens", "99")))
    assert line[line.index("--weight-version") + 1] == "0"
    assert "--incremental-streaming-output" in line
    assert line[-2:] == ["--max-total-tokens", "99"]
    assert "--attention-backend" not in argv(replace(spec, device="cuda"))
    assert "--enable-fp32-lm-head" not in line
    assert "--enable-fp32-lm-head" in argv(replace(spec, dtype="bfloat16"))


def test_environment_is_offline_and_leaves_ours_alone(spec: EngineSpec) -> None:
    before = dict(os.environ)
    env = environment(spec)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in env
    assert dict(os.environ) == before


def test_room_for_adapters_is_made_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    def options(**settings: Any) -> list[str]:
        line = argv(EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", **settings))
        return [argument for argument in line if "lora" in argument or argument.endswith("_proj")]

    assert options() == []
    rank = ["--max-lora-rank", "--lora-backend", "--enable-lora", "--lora-target-modules"]
    assert options(lora_rank=4, lora_targets=("self_attn.q_proj", "o_proj")) == [*rank, "o_proj", "q_proj"]
    on_gpu = options(lora_rank=4, device="cuda")  # SGLang's own choice of a backend
    assert on_gpu[:4] == ["--max-lora-rank", "--enable-lora", "--lora-target-modules", "down_proj"]


def test_a_seed_reaches_the_server(tiny_model: Path, tmp_path: Path) -> None:
    def seed(**settings: Any) -> list[str]:
        line = argv(EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", **settings))
        return line[line.index("--random-seed") :][:2] if "--random-seed" in line else []

    assert (seed(), seed(seed=0), seed(seed=7)) == ([], ["--random-seed", "0"], ["--random-seed", "7"])


def test_a_server_reports_experts_where_it_is_asked_to(tiny_model: Path, tmp_path: Path) -> None:
    for asked in (False, True):
        spec = EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "log", routed_experts=asked)
        assert ("--enable-return-routed-experts" in argv(spec)) == asked


@pytest.mark.parametrize(
    ("publish", "trainer", "expected"),
    [
        ({"pause": "in_place"}, {}, True),
        ({"pause": "retract"}, {}, False),
        ({"pause": "in_place"}, {"lora": {"rank": 4, "publish": "adapter"}}, False),  # no engine pauses
    ],
)
def test_an_engine_that_is_paused_in_place_computes_no_batch_meanwhile(
    tiny_model: Path, tmp_path: Path, publish: dict[str, Any], trainer: dict[str, Any], expected: bool
) -> None:
    run = RunConfig(name="r", model="m", agent="a:B", tasks="t", publish=publish, trainer=trainer)
    spec = engine_spec(run, tiny_model, 0, port=1, log_file=tmp_path / "log")
    assert ("--disable-overlap-schedule" in argv(spec)) == expected
