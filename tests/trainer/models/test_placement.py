"""Where a loaded model's tensors are: all on the device that computes, whatever family, policy or critic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_family
from torch import nn

from agentrl.trainer.models import loading
from agentrl.trainer.models.critic import Critic
from agentrl.trainer.models.policy import Policy

ELSEWHERE = torch.device("meta")
"""Stands for a GPU: what is not moved there stays on the CPU, and its type tells."""


def left(root: nn.Module) -> Iterator[str]:
    """The names of parameters, buffers and other tensors of modules that are on the CPU."""
    for path, module in root.named_modules():
        own: dict[str, Any] = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                yield f"{path}.{name}"


@pytest.mark.parametrize("wrap", [Policy, Critic])
@pytest.mark.parametrize("family", ["Llama", "Phi-3, longrope", "gpt-oss", "Qwen3.5", "Mamba 2", "DeepSeek V3"])
def test_nothing_of_a_model_stays_on_the_cpu(family: str, wrap: Any, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    lm, names = loading.build(folder)
    root = wrap(lm)
    root.planted = torch.ones(3)
    planted = set(left(root))
    assert ".planted" in planted
    loading.fill(root, lm, folder, names, ELSEWHERE, ELSEWHERE)
    assert list(left(root)) == []


def test_every_family_is_known() -> None:
    assert {"Llama", "Phi-3, longrope", "gpt-oss", "Qwen3.5", "Mamba 2", "DeepSeek V3"} <= FAMILIES.keys()
