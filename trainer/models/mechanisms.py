"""Reads from a model's configuration and modules how it mixes tokens and how it computes logits.

Forests of prefix trees are exact for full attention and for sliding windows, with positions that do not depend on other
sequences, and for layers whose state is carried along the forest (recurrence/carrying.py). They are not exact for three
mechanisms:

    other layers        with a state hand it to the next token of the forest, which may belong to another sequence
    chunked attention   does not tell the attention function about its chunks
    longrope            chooses its frequencies by the longest of all sequences together

Other mechanisms are found by comparing hidden states (packing_probe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from agentrl.trainer.recurrence import carrying

PLAIN = "eager"
"""transformers' name for the attention, or the loop over experts, in a model's own file."""
ROW_BYTES = 16
"""Grouped products need rows whose size in bytes is a multiple of this."""
PACKED = {"full_attention", "sliding_attention", "attention"}
"""Layer types for which forests are exact."""
WITH_STATE = {"linear_attention", "conv", "mamba", "mamba2", "hybrid"}
"""Layer types for which forests are exact if all their layers with a state are carried along."""
FEED_FORWARD = {"dense", "sparse", "mlp", "moe"}
"""Layer types that do not mix tokens."""
MULTIPLIED = ("logit_scale", "lm_head_multiplier")
DIVIDED = ("logits_scaling",)
"""Keys of a configuration whose values multiply or divide the logits."""


def unpackable(lm: Any) -> str:
    """The mechanism that prevents packing of a model's sequences; empty when no such mechanism is known."""
    config = lm.config.get_text_config()
    carriers = carrying.carriers(lm)
    types = set(_layer_types(config)) - PACKED - FEED_FORWARD - (WITH_STATE if carriers else set())
    if types:
        return f"it has layers of type {', '.join(sorted(types))}"
    if getattr(config, "attention_chunk_size", None) and not _layer_types(config):
        return "it attends in chunks"
    if "longrope" in _rope_kinds(config):
        return "its positions are of type longrope, which depend on the length of a sequence"
    known = {part for layer in carriers for part in layer.modules()}
    if any(isinstance(module, nn.Conv1d) and module not in known for module in lm.modules()):
        return "it has convolutions over tokens"
    if not carriers and not lm._supports_attention_backend:
        return "its attention is none of transformers' attention functions"
    return ""


def attention_of(lm: Any) -> str:
    """The attention with which transformers computes a model: its own choice, except that SDPA ignores soft caps."""
    capped = getattr(lm.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return PLAIN if capped else str(lm.config._attn_implementation)


def untrainable(lm: Any) -> str:
    """Why a model cannot be trained at all; empty when nothing is known to prevent it."""
    config = lm.config.get_text_config()
    if any("dynamic" in kind for kind in _rope_kinds(config)):
        return "positions of type dynamic depend on the sequences before: set another rope_type in its config.json"
    if getattr(config, "final_logit_softcapping", None) is not None:
        return "config key 'final_logit_softcapping' is not supported by the trainer"
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        return "an output head with a bias is not supported by the trainer"
    return ""


def narrow_experts(lm: Any, dtype: torch.dtype) -> bool:
    """Whether a mixture has fused experts that grouped products cannot compute in `dtype`: their rows must have a
    multiple of ROW_BYTES.
    """
    fused = (module for module in lm.modules() if hasattr(module, "_is_expert_parallel"))
    sizes = [size for module in fused for p in module.parameters(recurse=False) if p.ndim == 3 for size in p.shape[1:]]
    return any(size * dtype.itemsize % ROW_BYTES for size in sizes)


def window(lm: Any) -> int | None:
    """The sliding window of a model's layers, if any layer has one."""
    config = lm.config.get_text_config()
    types = _layer_types(config)
    size: int | None = getattr(config, "sliding_window", None)
    return size if size and (not types or "sliding_attention" in types) else None


def logit_scale(config: Any) -> float:
    """The factor on the product of hidden states and head."""
    scale = 1.0
    for key in MULTIPLIED:
        scale *= getattr(config, key, None) or 1.0
    for key in DIVIDED:
        scale /= getattr(config, key, None) or 1.0
    return scale


def _layer_types(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def _rope_kinds(config: Any) -> set[str]:
    """The rope types of all layers; a configuration may have one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, Mapping)]
    return {str(entry.get("rope_type", "default")) for entry in nested or [parameters]}
