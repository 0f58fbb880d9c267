"""Counts the floating-point operations of a model's passes, and knows the peak rate of the devices.

A multiplication and an addition are two operations. Counted are weight products, and products of queries and keys and
of weights and values for the pairs that attention allows; not what a backward pass computes again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from agentrl.configs.trainer_config import UpdateConfig
from agentrl.trainer.metrics.devices import Device, candidates, reported
from agentrl.trainer.metrics.model_shape import Shape, shape_of

ASK_POWER = ("nvidia-smi", "--query-gpu=power.max_limit", "--format=csv,noheader,nounits", "-i")
ASK_TIMEOUT_S = 10.0
COUNTED = ("tokens", "predictions", "pairs")


@dataclass(slots=True)
class Work:
    """What passes have computed."""

    tokens: float = 0.0  # through the blocks
    predictions: float = 0.0  # through the head
    pairs: float = 0.0  # of a token and one that it attends to, without windows

    def add(self, tokens: float, predictions: float, pairs: float) -> None:
        """Add a pass."""
        self.tokens += tokens
        self.predictions += predictions
        self.pairs += pairs


@dataclass(slots=True)
class PassCounts:
    """The forward passes of one model, and those of them that a backward pass follows."""

    forward: Work
    backward: Work

    @classmethod
    def none(cls) -> PassCounts:
        """Nothing yet."""
        return cls(Work(), Work())

    def add(self, tokens: float, predictions: float, pairs: float, *, trains: bool) -> None:
        """Add a pass; `trains`: its gradients are computed, too."""
        self.forward.add(tokens, predictions, pairs)
        if trains:
            self.backward.add(tokens, predictions, pairs)

    def taken(self) -> dict[str, float]:
        """The counts by name; begins again at nothing."""
        counts = {
            f"{kind}_{name}": float(getattr(work, name))
            for kind, work in (("forward", self.forward), ("backward", self.backward))
            for name in COUNTED
        }
        self.forward, self.backward = Work(), Work()
        return counts

    @classmethod
    def of(cls, counts: Mapping[str, float], prefix: str = "") -> PassCounts:
        """Passes from counts by name."""
        forward, backward = (
            Work(*(counts[f"{prefix}{kind}_{name}"] for name in COUNTED)) for kind in ("forward", "backward")
        )
        return cls(forward, backward)


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of one device; None when unknown."""
    found = device_of(device)
    return None if found is None else found.flops


def device_of(device: torch.device) -> Device | None:
    """The device of the table that a torch device is; None for a CPU and for one that is not known."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    memory = int(about.total_memory)
    power_w = _power_limit(str(about.uuid)) if len(candidates(about.name, memory)) > 1 else None
    return reported(about.name, memory, power_w)


@cache
def _power_limit(uuid: str) -> float | None:
    """The largest power limit of a GPU in watts, if nvidia-smi tells it."""
    try:
        told = subprocess.run([*ASK_POWER, f"GPU-{uuid}"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        return float(told.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def matmul_flops(model: Mapping[str, Any], tokens: float, predictions: float) -> float:
    """Operations of one forward pass's weight products: 2 per parameter that a token uses; of the head, per prediction.

    `model` is the configuration of a model that `shape_of` knows. Products inside attention are not counted.
    """
    shape = shape_of(model)
    assert shape is not None
    return _forward(shape, Work(tokens, predictions))


def update_flops(model: Mapping[str, Any], passes: PassCounts, config: UpdateConfig) -> float:
    """Operations of a step's passes through one model that `shape_of` knows.

    A backward pass costs as much as a forward pass for the activations' gradients, and as much again for the gradients
    of trained matrices and of attention's other operand. It ends at the lowest trained block.
    """
    shape = shape_of(model)
    assert shape is not None
    trained = config.train_layers or len(shape.blocks)
    back, adapter = passes.backward, bool(config.lora.rank)
    blocks = _blocks(shape, back.tokens, trained) * (1 if adapter else 2)
    head = 2.0 * shape.head * back.predictions * (1 if adapter or config.train_layers else 2)
    return _forward(shape, passes.forward) + blocks + head + 2 * _attention(shape, back.pairs, trained)


def _forward(shape: Shape, work: Work) -> float:
    every = len(shape.blocks)
    head = 2.0 * shape.head * work.predictions
    return _blocks(shape, work.tokens, every) + head + _attention(shape, work.pairs, every)


def _blocks(shape: Shape, tokens: float, top: int) -> float:
    """Weight products of the top blocks in one pass over tokens."""
    return 2.0 * tokens * sum(block.products for block in shape.blocks[len(shape.blocks) - top :])


def _attention(shape: Shape, pairs: float, top: int) -> float:
    """Products inside attention of the top blocks; blocks with a window are left out."""
    return 2.0 * pairs * shape.pair * sum(shape.full_attention[len(shape.blocks) - top :])
