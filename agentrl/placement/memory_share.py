"""The share of a GPU's memory for an engine that takes turns with the trainer: what the trainer leaves between steps.

Between two steps a trainer keeps the float32 master weights of its part of the model and AdamW's two moments of what it
trains. Gradients, activations and gathered blocks are freed before engines take their memory back.
"""

from __future__ import annotations

import math
from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.errors import ConfigError
from agentrl.versions.tensor_header import read_header

ALONE = 0.85
"""Share for an engine without a trainer beside it. The rest is for CUDA graphs and activations."""
LEAST = 0.1
PROCESS_BYTES = 2 * 2**30
"""CUDA context, communication buffers and fragments of an idle trainer process."""
FLOAT32 = 4


def parameters(model: Path) -> int:
    """The number of parameters in a model's safetensors files."""
    return sum(math.prod(entry.shape) for path in model.glob("*.safetensors") for entry in read_header(path).entries)


def gpu_bytes() -> int:
    """The memory of the first GPU of this machine."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def kept_bytes(config: RunConfig, n_parameters: int, of_teachers: int = 0) -> int:
    """Upper bound on what a rank of the trainer keeps on its GPU between two steps, of a model with `n_parameters` and
    teachers with `of_teachers`.
    """
    trainer, size = config.trainer, config.resources.trainer
    if trainer.cpu_offload:
        return PROCESS_BYTES
    per_parameter = FLOAT32 if trainer.lora.rank else 3 * FLOAT32
    if trainer.algorithm.estimator == "gae":
        per_parameter += 3 * FLOAT32  # the critic
    if trainer.algorithm.needs_reference:
        per_parameter += FLOAT32
    held = n_parameters * per_parameter + of_teachers * FLOAT32
    return PROCESS_BYTES + math.ceil(held * size.replicas / size.ranks)


def beside_idle_trainer(kept: int, total: int) -> float:
    """The share of `total` bytes for an engine beside a trainer that keeps some. Raises ConfigError for too little."""
    share = math.floor(100 * (ALONE - kept / total)) / 100
    if share < LEAST:
        raise ConfigError(
            f"the trainer keeps {kept / 2**30:.1f} GiB of a GPU of {total / 2**30:.1f} GiB between its steps, which "
            "leaves too little for an engine: use more GPUs or trainer.cpu_offload, or set engine.memory_fraction"
        )
    return share
