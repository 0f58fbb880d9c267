"""Attention over prefix trees, as an attention function of transformers.

Everything except attention works on a flat list of N distinct tokens. Attention gathers them into B rows of at most L
places, one row for a group or for several small groups. Its cost is therefore quadratic in a tree and not in the whole
microbatch. A token that several rows share, such as a common system prompt, is still computed once. h: heads, d: head
size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from agentrl.errors import UnknownAttention
from agentrl.trainer.parallel.context_parallel import Share

NAME = "agentrl_tree"
KNOWN = frozenset({"position_ids", "use_cache"})
"""Arguments that models pass to attention and that do not change it: queries and keys contain the positions."""
SINK_SIZE = 8
"""The number of dimensions that a sink adds to a head: kernels need a multiple of it."""


class Rows:
    """The places of the N tokens in the rows.

    This is not a dataclass because FSDP with mixed precision would give each block its own copy of a dataclass.
    """

    __slots__ = ("beside_sinks", "depth", "homes_N", "mask_B1LL", "nodes_BL", "positions_N", "windows")

    def __init__(self, nodes_BL: Tensor, homes_N: Tensor, mask_B1LL: Tensor, positions_N: Tensor, depth: int) -> None:
        self.nodes_BL = nodes_BL  # int64, the token at each place; 0 in padding
        self.homes_N = homes_N  # int64, flat index into B × L: the place whose output is the token's
        self.mask_B1LL = mask_B1LL  # additive: 0 where a place attends to another, very negative elsewhere
        self.positions_N = positions_N  # int64, each token's position in its sequence
        self.depth = depth  # length of the longest sequence
        self.windows = dict[int, Tensor]()  # masks by sliding window, made when first needed
        self.beside_sinks = dict[int | None, Tensor]()  # the same with a column for the sink

    def mask(self, window: int | None) -> Tensor:
        """(B, 1, L, L) mask in which a place attends to its sequence's last `window` tokens, or to all of them."""
        if window is None:
            return self.mask_B1LL
        if window not in self.windows:
            self.windows[window] = self.mask_B1LL if window >= self.depth else self._narrowed(window)
        return self.windows[window]

    def mask_with_sink(self, window: int | None) -> Tensor:
        """(B, 1, L, L + 1) the mask with a last column that every place attends to."""
        if window not in self.beside_sinks:
            self.beside_sinks[window] = pad(self.mask(window), (0, 1))
        return self.beside_sinks[window]

    def _narrowed(self, window: int) -> Tensor:
        positions_BL = self.positions_N[self.nodes_BL]
        far_BLL = positions_BL[:, :, None] - positions_BL[:, None, :] >= window
        return self.mask_B1LL.masked_fill(far_BLL[:, None], torch.finfo(self.mask_B1LL.dtype).min)


def tree_mask(ends_BL: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, L, L) additive mask: place i attends to place j iff j <= i < ends[j]."""
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
    share: Share | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Gather rows, attend, scatter back: (1, N, h, d). `s_aux` (h,) holds the logit of each head's sink. With a `share`
    of the N tokens, queries, keys, values and the result are those of the share.

    Raises UnknownAttention when a model needs another attention: it changed the mask, or passed an argument that is not
    in KNOWN.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and name not in KNOWN)
    unknown += [name for name, asked in (("dropout", dropout), ("is_causal", is_causal is False)) if asked]
    if attention_mask is not rows.mask_B1LL:
        unknown.append("a mask of its own")
    if unknown:
        raise UnknownAttention(f"{type(module).__name__} attends with {', '.join(unknown)}")
    scale = query_1hNd.shape[-1] ** -0.5 if scaling is None else scaling
    attend = partial(_attend, rows, scale, sliding_window)
    if share is not None:
        return share.attend(attend, query_1hNd, key_1hNd, value_1hNd, s_aux), None
    return attend(query_1hNd, key_1hNd, value_1hNd, s_aux), None


def _attend(
    rows: Rows,
    scale: float,
    window: int | None,
    query_1hNd: Tensor,
    key_1hNd: Tensor,
    value_1hNd: Tensor,
    sinks_h: Tensor | None,
) -> Tensor:
    """(1, N, h, d)"""
    q_BhLd, k_BhLd, v_BhLd = (_rows(x_1hNd, rows.nodes_BL) for x_1hNd in (query_1hNd, key_1hNd, value_1hNd))
    mask = rows.mask(window)
    if sinks_h is not None:
        q_BhLd, k_BhLd, v_BhLd = _with_sink(q_BhLd, k_BhLd, v_BhLd, sinks_h / scale)
        mask = rows.mask_with_sink(window)
    out_BhLd = scaled_dot_product_attention(
        q_BhLd, k_BhLd, v_BhLd, attn_mask=mask, scale=scale, enable_gqa=k_BhLd.shape[1] != q_BhLd.shape[1]
    )[..., : value_1hNd.shape[-1]]
    return out_BhLd.transpose(1, 2).flatten(0, 1)[rows.homes_N][None]


def _with_sink(q_BhLd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor, sinks_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with one more key, whose logit is the sink's and whose value is 0.

    Heads become larger. In the first new dimension, queries hold their head's sink, the sink's key holds 1 and other
    keys hold 0.
    """
    larger = (0, SINK_SIZE)
    q_BhLd, k_BhLd, v_BhLd = pad(q_BhLd, larger), pad(k_BhLd, (*larger, 0, 1)), pad(v_BhLd, (*larger, 0, 1))
    at = torch.arange(q_BhLd.shape[-1], device=q_BhLd.device) == q_BhLd.shape[-1] - SINK_SIZE
    q_BhLd = torch.where(at, sinks_h.to(q_BhLd.dtype)[:, None, None], q_BhLd)
    k_BhLd = torch.cat([k_BhLd[:, :, :-1], at.to(k_BhLd.dtype).expand_as(k_BhLd[:, :, -1:])], 2)
    return q_BhLd, k_BhLd, v_BhLd


def _rows(x_1hNd: Tensor, nodes_BL: Tensor) -> Tensor:
    """(B, h, L, d) the tokens of each row."""
    x_Nhd = x_1hNd[0].transpose(0, 1)
    return x_Nhd.index_select(0, nodes_BL.flatten()).view(*nodes_BL.shape, *x_Nhd.shape[1:]).transpose(1, 2)


def register() -> None:
    """Register the function with transformers under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)
