"""Attention over prefix trees, as an attention function of transformers.

Everything but attention works on a flat list of N distinct tokens. Attention gathers them into B rows of at most L,
one row for a group (or several small ones), so that its cost is quadratic in a tree and not in the whole microbatch;
a token that several rows share, such as a common system prompt, is still computed once. h: heads, d: head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.errors import UserError

NAME = "agentrl_tree"


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the N tokens stand in the rows."""

    nodes_BL: Tensor  # int64, the token at each place; 0 in padding
    homes_N: Tensor  # int64, flat index into B × L: the place whose output is a token's own
    mask_B1LL: Tensor  # additive: 0 where a place sees another, very negative elsewhere
    depth: int  # longest sequence


def tree_mask(ends_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, L, L) additive mask: place i sees place j iff j <= i < ends[j]."""
    i_L = torch.arange(ends_BL.shape[1], device=ends_BL.device)
    sees_BLL = (i_L[None, None, :] <= i_L[None, :, None]) & (i_L[None, :, None] < ends_BL[:, None, :])
    mask_BLL = torch.zeros(sees_BLL.shape, dtype=dtype, device=ends_BL.device)
    return mask_BLL.masked_fill_(~sees_BLL, torch.finfo(dtype).min)[:, None]


def tree_attention(
    module: torch.nn.Module,
    query_1hNd: Tensor,
    key_1hNd: Tensor,
    value_1hNd: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Gather rows, attend, scatter back: (1, N, h, d)."""
    if (sliding_window is not None and rows.depth > sliding_window) or softcap is not None:
        raise UserError(f"{type(module).__name__}: no training with soft caps or windows shorter than a trajectory")
    out_BhLd = torch.nn.functional.scaled_dot_product_attention(
        _rows(query_1hNd, rows.nodes_BL),
        _rows(key_1hNd, rows.nodes_BL),
        _rows(value_1hNd, rows.nodes_BL),
        attn_mask=rows.mask_B1LL,
        scale=scaling,
        enable_gqa=key_1hNd.shape[1] != query_1hNd.shape[1],
    )
    return out_BhLd.transpose(1, 2).flatten(0, 1)[rows.homes_N][None], None


def _rows(x_1hNd: Tensor, nodes_BL: Tensor) -> Tensor:
    """(B, h, L, d)"""
    x_Nhd = x_1hNd[0].transpose(0, 1)
    return x_Nhd.index_select(0, nodes_BL.flatten()).view(*nodes_BL.shape, *x_Nhd.shape[1:]).transpose(1, 2)


def register() -> None:
    """Make transformers know the function, under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
