"""What a trainer keeps on its GPU between steps, and what it leaves an engine there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.placement import memory_share
from agentrl.placement.memory_share import PROCESS_BYTES

GIB = 2**30
BILLION = 10**9


def config(trainer: dict[str, Any], ranks: int = 1, replicas: int = 1) -> RunConfig:
    sizes = {"ranks": ranks, "replicas": replicas}
    return RunConfig.model_validate({"name": "r", "model": "m", "trainer": trainer, "resources": {"trainer": sizes}})


def test_the_parameters_of_all_files_are_counted(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float32)}, tmp_path / "1.safetensors")
    save_file({"c": np.zeros((2, 2), np.float16)}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    assert memory_share.parameters(tmp_path) == 12 + 5 + 4


@pytest.mark.parametrize(
    ("trainer", "ranks", "replicas", "bytes_per_parameter"),
    [
        ({}, 1, 1, 12),
        ({}, 8, 1, 12 / 8),
        ({}, 8, 4, 12 / 2),
        ({"lora": {"rank": 8}}, 1, 1, 4),
        ({"algorithm": {"kl_coef": 0.1}}, 1, 1, 16),
        ({"algorithm": {"preset": "ppo"}}, 1, 1, 24),
        ({"cpu_offload": True, "device": "cuda"}, 1, 1, 0),
    ],
)
def test_the_memory_of_a_rank_between_steps_is_computed(
    trainer: dict[str, Any], ranks: int, replicas: int, bytes_per_parameter: float
) -> None:
    kept = memory_share.kept_bytes(config(trainer, ranks, replicas), BILLION)
    assert kept == PROCESS_BYTES + bytes_per_parameter * BILLION


def test_a_teachers_weights_are_kept_too() -> None:
    taught = config({"teacher": "t", "algorithm": {"distill_coef": 1.0}}, ranks=2)
    assert memory_share.kept_bytes(taught, BILLION, 3 * BILLION) == PROCESS_BYTES + (12 + 3 * 4) * BILLION / 2


def test_an_engine_gets_the_rest_or_the_run_does_not_start() -> None:
    assert memory_share.beside_idle_trainer(0, 80 * GIB) == 0.85
    assert memory_share.beside_idle_trainer(20 * GIB, 80 * GIB) == 0.6
    with pytest.raises(ConfigError, match=r"keeps 70.0 GiB of a GPU of 80.0 GiB .* set engine.memory_fraction"):
        memory_share.beside_idle_trainer(70 * GIB, 80 * GIB)
