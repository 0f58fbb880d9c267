"""The attention function that transformers' models call with the forest of a microbatch. h: heads, d: head size."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from agentrl.errors import UnknownAttention, UserError
from agentrl.trainer.attention import flex
from agentrl.trainer.attention.split import split_attention
from agentrl.trainer.attention.tree import Tree
from agentrl.trainer.parallel.context_parallel import Share

SPLIT, FLEX = "agentrl_split", "agentrl_flex"
"""transformers' names for our attention: in pieces (split.py), or by GPU kernels (flex.py)."""
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
    share: Share | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    gpu_kernels: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend along the forest: (1, N, h, d). `s_aux` (h,) holds the logit of each head's sink. With a `share` of the N
    tokens, queries, keys, values and the result are those of the share.

    Sequences that share nothing are one call of flash attention on a GPU. Otherwise the attention is computed by
    FlexAttention with `gpu_kernels`, and in pieces without.

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
    attend = partial(_attend, tree, sliding_window, scale, gpu_kernels)
    if share is not None:
        return share.attend(attend, query_1hNd, key_1hNd, value_1hNd, s_aux), None
    return attend(query_1hNd, key_1hNd, value_1hNd, s_aux).transpose(1, 2), None


def _attend(
    tree: Tree,
    window: int | None,
    scale: float,
    gpu_kernels: bool,
    query_1hNd: Tensor,
    key_1hNd: Tensor,
    value_1hNd: Tensor,
    sinks_h: Tensor | None,
) -> Tensor:
    """(1, h, N, d)"""
    heads = query_1hNd, key_1hNd, value_1hNd
    if flex.takes_sequences(query_1hNd, value_1hNd, tree, sinks_h):
        return flex.sequences(*heads, tree, window, scale)
    if gpu_kernels:
        return flex.flex(*heads, tree, window, scale, sinks_h)
    return split_attention(*heads, tree, window, scale, sinks_h)


def name_for(setting: Literal["auto", "split", "flex"], device: str) -> str:
    """The attention of a setting. `auto`: FlexAttention on CUDA, pieces elsewhere. Raises UserError without a GPU."""
    if setting == "flex" and device == "cpu":
        raise UserError("trainer.attention: flex needs a GPU; on a CPU use split or auto")
    return FLEX if setting == "flex" or (setting == "auto" and device == "cuda") else SPLIT


def register() -> None:
    """Register both attentions with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(SPLIT, tree_attention)
    AttentionInterface.register(FLEX, partial(tree_attention, gpu_kernels=True))
