"""The model that is trained, and what its arithmetic comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "RTX 4090": 165.0}
"""Dense bfloat16 products with float32 sums, by a part of the device's name (NVIDIA's data sheets)."""


def save_random_model(folder: Path, *, tiny: bool = False) -> Path:
    """A Llama with random weights: of SmolLM2-135M's shape, or of nobody's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    smollm2 = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    }  # fmt: skip
    small = {
        "vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(small if tiny else smollm2), tie_word_embeddings=True)).save_pretrained(folder)
    return folder


def matmul_flops(config: dict[str, Any], tokens: int, predictions: int) -> float:
    """Of a step's weight products: 2 a parameter and token for each of recomputation and forward, 4 for the backward.

    Attention's own products are not counted, so that the figure is a lower bound.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * head_size * (heads + config["num_key_value_heads"])
    block = attention + 3 * hidden * config["intermediate_size"]
    return 8.0 * (config["num_hidden_layers"] * block * tokens + hidden * config["vocab_size"] * predictions)
