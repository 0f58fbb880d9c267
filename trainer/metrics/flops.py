"""Counts the floating-point operations of a model's weight products, and knows the peak rate of some GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.configs.trainer_config import UpdateConfig

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Part of a device's name → peak of dense bfloat16 products with float32 sums (NVIDIA's data sheets)."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens through the blocks and predictions through the head, of all forward and of all backward passes."""

    forward: tuple[float, float]
    backward: tuple[float, float]


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of one device; None when unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def is_dense(model: Mapping[str, Any]) -> bool:
    """Whether `matmul_flops` can count the model: blocks of attention and a gated MLP, without experts."""
    return all(model.get(size) for size in SIZES) and not any(model.get(experts) for experts in EXPERTS)


def matmul_flops(model: Mapping[str, Any], tokens: float, predictions: float) -> float:
    """Operations of one forward pass's weight products: 2 per parameter and token; of the head, per prediction.

    `model` is the model's configuration. Products inside attention are not counted, so this is a lower bound.
    """
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_size = model.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + model["num_key_value_heads"])
    block = attention + 3 * hidden * model["intermediate_size"]
    products = model["num_hidden_layers"] * block * tokens + hidden * model["vocab_size"] * predictions
    return 2.0 * float(products)


def update_flops(model: Mapping[str, Any], work: Work, config: UpdateConfig) -> float:
    """Operations of a step's weight products.

    A backward pass costs as much as a forward pass for the activations' gradients, and as much again for the gradients
    of trained matrices. It ends at the lowest trained block.
    """
    tokens, predictions = work.backward
    reached = dict(model) | {"num_hidden_layers": config.train_layers or model["num_hidden_layers"]}
    blocks = 1 if config.lora.rank else 2
    head = 1 if config.lora.rank or config.train_layers else 2
    return (
        matmul_flops(model, *work.forward)
        + blocks * matmul_flops(reached, tokens, 0)
        + head * matmul_flops(reached, 0, predictions)
    )
