"""What a model's configuration and modules say about how it mixes tokens, and how its logits are made.

Rows of a prefix tree are exact for full attention and sliding windows with positions that do not depend on the other
sequences. A layer that hands a state from one token to the next takes the next token of the row, which may be of
another sequence; a chunk is not told to attention; and frequencies that depend on the longest sequence are those of
all sequences together. What is not known here is found by comparing (packing_probe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

PLAIN = "eager"
"""transformers' name of the attention that a model's own file has."""
PACKED = {"full_attention", "sliding_attention", "attention"}
"""Types of layers that rows of a prefix tree are exact for."""
FEED_FORWARD = {"dense", "sparse", "mlp", "moe"}
"""Types of layers that do not mix tokens."""
MULTIPLIED = ("logit_scale", "lm_head_multiplier")
DIVIDED = ("logits_scaling",)
"""Keys of a configuration by which logits are multiplied and divided."""


def unpackable(lm: Any) -> str:
    """The mechanism for which sequences of a model cannot be packed; empty where none is known."""
    config = lm.config.get_text_config()
    types = set(_layer_types(config)) - PACKED - FEED_FORWARD
    if types:
        return f"it has layers of type {', '.join(sorted(types))}"
    if getattr(config, "attention_chunk_size", None) and not _layer_types(config):
        return "it attends in chunks"
    if "longrope" in _rope_kinds(config):
        return "its positions are of type longrope, which depend on the length of a sequence"
    if any(isinstance(module, nn.Conv1d) for module in lm.modules()):
        return "it has convolutions over tokens"
    if not lm._supports_attention_backend:
        return "its attention is none of transformers' attention functions"
    return ""


def attention_of(lm: Any) -> str:
    """The attention by which transformers computes a model alone: its own choice, but SDPA leaves soft caps out."""
    capped = getattr(lm.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return PLAIN if capped else str(lm.config._attn_implementation)


def untrainable(lm: Any) -> str:
    """Why a model cannot be trained at all; empty where nothing is known against it."""
    config = lm.config.get_text_config()
    if any("dynamic" in kind for kind in _rope_kinds(config)):
        return "positions of type dynamic depend on the sequences before: set another rope_type in its config.json"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "config key 'final_logit_softcapping' is not supported by the trainer"
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        return "an output head with a bias is not supported by the trainer"
    return ""


def window(lm: Any) -> int | None:
    """The sliding window of some of a model's layers, where there is one."""
    config = lm.config.get_text_config()
    types = _layer_types(config)
    size: int | None = getattr(config, "sliding_window", None)
    return size if size and (not types or "sliding_attention" in types) else None


def logit_scale(config: Any) -> float:
    """What the product of hidden states and head is multiplied by."""
    scale = 1.0
    for key in MULTIPLIED:
        scale *= getattr(config, key, None) or 1.0
    for key in DIVIDED:
        scale /= getattr(config, key, None) or 1.0
    return scale


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _rope_kinds(config: Any) -> set[str]:
    """Of all layers; a configuration may have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
    return {str(entry.get("rope_type", "default")) for entry in nested or [parameters]}
