"""Settings of the trainer that are `auto`: what they mean on its device. Pure functions of sizes.

    memory of a GPU = this process + weights, gradients, moments + what is gathered + head + tokens × what each keeps

The estimate of what a token keeps is that of decoder blocks whose norms are computed in float32, as transformers does;
`python -m pytest tests/trainer/run/test_device_defaults.py` compares it with what torch keeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs.engine_config import default_dtype
from agentrl.configs.trainer_config import CPU_TOKENS, TrainerConfig, UpdateConfig
from agentrl.domain.schemas import Json
from agentrl.trainer.metrics.model_shape import Shape, shape_of

LEAST, MOST, STEP = 1024, 131_072, 1024
"""Bounds and granularity of `tokens_per_microbatch: auto` on a GPU."""
UNKNOWN = 8192
"""Tokens for a model whose shape is not known."""
PROCESS_BYTES = 2 * 2**30
"""CUDA context, communication buffers and cuBLAS workspaces."""
HEAD_BYTES = 2**30
"""Distributions that the head keeps (`head.KEPT_BYTES`), and those at work."""
USED = 0.9
"""Share of the memory that is planned with; the rest is for fragments and for microbatches that do not fit a plan."""
SLACK = 1.2
"""Factor on what a token keeps, for temporaries of attention and of the backward pass."""
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDevice:
    """The device of a rank."""

    kind: str  # `cpu` or `cuda`
    memory_bytes: int = 0  # of one GPU, for the trainer alone
    shards: int = 1  # ranks that share one replica's weights


def compute_dtype(config: UpdateConfig, kind: str, began_with: str | None = None) -> str:
    """The compute type: the configured one, or else the one that the run began with, or else the device's."""
    if config.dtype != "auto":
        return config.dtype
    return began_with or default_dtype("cuda" if kind == "cuda" else "cpu")


def microbatch_tokens(
    config: UpdateConfig, dtype: str, shape: Shape | None, device: RankDevice, teachers: Sequence[Shape] = ()
) -> int:
    """The tokens of a microbatch: the configured number, or else as many as a GPU's memory holds beside the models."""
    if config.tokens_per_microbatch != "auto":
        return config.tokens_per_microbatch
    if device.kind != "cuda":
        return CPU_TOKENS
    if shape is None:
        return UNKNOWN
    free = USED * device.memory_bytes - held_bytes(config, dtype, shape, device.shards)
    free -= sum(teacher_bytes(config, dtype, teacher, device.shards) for teacher in teachers)
    tokens = int(free / (SLACK * kept_bytes(config, dtype, shape)))
    return min(MOST, max(LEAST, tokens // STEP * STEP))


def held_bytes(config: UpdateConfig, dtype: str, shape: Shape, shards: int) -> int:
    """Bytes on a rank's GPU that do not depend on the tokens of a microbatch."""
    trained = config.train_layers or len(shape.blocks)
    size, blocks = _size(dtype), sum(block.parameters for block in shape.blocks)
    ends = shape.head * (1 if shape.tied else 2)  # embedding and head, which the root gathers
    learns = 0 if config.lora.rank else sum(b.parameters for b in shape.blocks[-trained:])
    learned_ends = 0 if config.lora.rank or config.train_layers else ends
    own = FLOAT32 * (blocks + ends) + 3 * FLOAT32 * (learns + learned_ends)  # master weights; gradients and two moments
    models, averaged = 1, 0
    if isinstance(config, TrainerConfig):
        models += config.algorithm.needs_critic
        averaged = FLOAT32 * (learns + learned_ends) * (config.average is not None)  # of the policy alone
        own += FLOAT32 * (learns + learned_ends) * config.algorithm.needs_reference
    gathered = blocks if config.keep_gathered else 2 * max(block.parameters for block in shape.blocks)
    work = (
        size * (gathered + ends) + (size + FLOAT32) * learned_ends + FLOAT32 * (learns if config.keep_gathered else 0)
    )
    held = 0 if config.cpu_offload else (models * own + averaged) // shards
    return held + models * work + HEAD_BYTES + PROCESS_BYTES


def teacher_bytes(config: UpdateConfig, dtype: str, shape: Shape, shards: int) -> int:
    """Bytes on a rank's GPU for a model of this shape that only scores: float32 weights, and what is gathered."""
    ends, largest = shape.head * (1 if shape.tied else 2), max(block.parameters for block in shape.blocks)
    held = FLOAT32 * (sum(block.parameters for block in shape.blocks) + ends) // shards
    return (0 if config.cpu_offload else held) + _size(dtype) * (2 * largest + ends)


def kept_bytes(config: UpdateConfig, dtype: str, shape: Shape) -> int:
    """Bytes that one token keeps until the backward pass."""
    trained = config.train_layers or len(shape.blocks)
    size, hidden = _size(dtype), shape.hidden
    block = size * shape.widest + 2 * (FLOAT32 + size) * hidden  # its products, and two norms
    if not config.activation_checkpointing:
        return trained * block + 4 * FLOAT32 * hidden
    return trained * size * hidden + 2 * block + 4 * FLOAT32 * hidden


def _size(dtype: str) -> int:
    return BFLOAT16 if dtype == "bfloat16" else FLOAT32


def shape_in(folder: Path) -> Shape | None:
    """The shape of a model folder's language model."""
    config: Json = json.loads((folder / "config.json").read_text())
    return shape_of(config | (config.get("text_config") or {}))
