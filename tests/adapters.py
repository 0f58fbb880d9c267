"""Adapters that are as good as trained: every matrix of them is random."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from agentrl.configs.trainer_config import LoraConfig
from agentrl.models import linear_layers
from agentrl.trainer.models import lora


def write_adapter(folder: Path, base_model: Path, *, seed: int, rank: int, targets: list[str] | None = None) -> Path:
    """An adapter for engines, for layers with these last names or for all."""
    names = set(targets or linear_layers(base_model))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, matrix in load_file(base_model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in names and matrix.ndim == 2:
            out, into = matrix.shape
            tensors[layer + lora.A] = torch.randn(rank, into, generator=random) / into**0.5
            tensors[layer + lora.B] = torch.randn(out, rank, generator=random) / 10
    config = LoraConfig(rank=rank, alpha=2 * rank, targets=sorted(names))
    lora.write(folder, lora.for_engines(tensors, base_model), base_model, config)
    return folder
