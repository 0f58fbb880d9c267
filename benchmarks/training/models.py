"""Makes the model that the benchmark trains."""

from __future__ import annotations

from pathlib import Path

import torch


def save_random_model(folder: Path, *, tiny: bool = False) -> Path:
    """Save a Llama with random weights, in the shape of SmolLM2-135M or in a tiny one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    smollm2 = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
    }
    small = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(small if tiny else smollm2), tie_word_embeddings=True)).save_pretrained(folder)
    return folder
