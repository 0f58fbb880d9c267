"""A forest of a given size, and the model that reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agentrl.domain.batching import PrefixTree, build_tree
from agentrl.domain.schemas import Int32

VOCABULARY = 251


def branching(tokens: int, seed: int = 0) -> list[Int32]:
    """Eight sequences of one tree with `tokens` tokens: a prompt of a quarter, four branches, two answers to each."""
    rng = np.random.default_rng(seed)
    part = tokens // 16

    def new(count: int, first: int) -> Int32:
        """Tokens that begin with `first`, so that branches differ at once."""
        return np.concatenate([[first], rng.integers(0, VOCABULARY, count - 1)]).astype(np.int32)

    prompt = new(4 * part, 0)
    turns = [np.concatenate([prompt, new(part, i)]) for i in range(4)]
    return [np.concatenate([turn, new(part, i)]) for turn in turns for i in range(2)]


def independent(tokens: int, seed: int = 0) -> list[Int32]:
    """Four sequences that share nothing, with `tokens` tokens together."""
    rng = np.random.default_rng(seed)
    return [np.append(i, rng.integers(0, VOCABULARY, tokens // 4 - 1)).astype(np.int32) for i in range(4)]


def tree_of(sequences: list[Int32]) -> PrefixTree:
    """The sequences, merged."""
    return build_tree(sequences)


def model(*, layers: int, hidden: int, heads: int, groups: int, dtype: torch.dtype) -> Any:
    """A random Llama body without a head."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=131072,
        initializer_range=0.1,
    )
    return LlamaModel(config).to(dtype)
