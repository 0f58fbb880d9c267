"""What the arithmetic of a model comes to, and what a device can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from agentrl.configs.trainer_config import UpdateConfig

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Dense bfloat16 products with float32 sums, by a part of the device's name (NVIDIA's data sheets)."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that went through the blocks, and predictions through the head, in forward and in backward passes."""

    forward: tuple[float, float]
    backward: tuple[float, float]


def peak_flops(device: torch.device) -> float | None:
    """Of one device, a second; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def is_dense(model: Mapping[str, Any]) -> bool:
    """Whether `matmul_flops` knows the model: blocks of attention and a gated MLP, without experts."""
    return all(model.get(size) for size in SIZES) and not any(model.get(experts) for experts in EXPERTS)


def matmul_flops(model: Mapping[str, Any], tokens: float, predictions: float) -> float:
    """Of one forward pass's weight products: 2 a parameter and token, the head's for predictions alone.

    `model` is its configuration. Attention's own products are not counted, so that the figure is a lower bound.
    """
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    head_size = model.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + model["num_key_value_heads"])
    block = attention + 3 * hidden * model["intermediate_size"]
    products = model["num_hidden_layers"] * block * tokens + hidden * model["vocab_size"] * predictions
    return 2.0 * float(products)


def update_flops(model: Mapping[str, Any], work: Work, config: UpdateConfig) -> float:
    """Of a step's weight products. A backward costs as much as a forward for the activations, and as much again for
    matrices that are trained; it ends at the lowest block that is."""
    tokens, predictions = work.backward
    reached = dict(model) | {"num_hidden_layers": config.train_layers or model["num_hidden_layers"]}
    blocks = 1 if config.lora.rank else 2
    head = 1 if config.lora.rank or config.train_layers else 2
    return (
        matmul_flops(model, *work.forward)
        + blocks * matmul_flops(reached, tokens, 0)
        + head * matmul_flops(reached, 0, predictions)
    )
