"""The attention function that transformers' models call with the forest of a microbatch. h: heads, d: head size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agentrl.errors import UnknownAttention
from agentrl.trainer.attention.split import split_attention
from agentrl.trainer.attention.tree import Tree

NAME = "agentrl_tree"
KNOWN = frozenset({"position_ids", "use_cache"})
"""Arguments that models pass to attention and that do not change it: queries and keys contain the positions."""


def tree_attention(
    module: torch.nn.Module,
    query_1hNd: Tensor,
    key_1hNd: Tensor,
    value_1hNd: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: Tree,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend along the forest: (1, N, h, d). `s_aux` (h,) holds the logit of each head's sink.

    Raises UnknownAttention when a model needs another attention: it changed the mask, or passed an argument that is not
    in KNOWN.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in KNOWN)
    unknown += [name for name, asked in (("dropout", dropout), ("is_causal", is_causal is False)) if asked]
    if attention_mask is not tree.marker:
        unknown.append("a mask of its own")
    if unknown:
        raise UnknownAttention(f"{type(module).__name__} attends with {', '.join(unknown)}")
    scale = query_1hNd.shape[-1] ** -0.5 if scaling is None else scaling
    out_1hNd = split_attention(query_1hNd, key_1hNd, value_1hNd, tree, sliding_window, scale, s_aux)
    return out_1hNd.transpose(1, 2), None


def register() -> None:
    """Register the function with transformers under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
