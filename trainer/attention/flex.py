"""Attention along a forest by kernels that need a GPU: FlexAttention, and flash attention where nothing is shared.

FlexAttention compiles one kernel for all forests: it skips blocks without a visible pair, and masks those with some.
h: query heads, g: key and value heads, d: head size, N: tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.trainer.attention.kernels import fits_flash
from agentrl.trainer.attention.tree import Tree


def flex(
    q_1hNd: Tensor, k_1gNd: Tensor, v_1gNd: Tensor, tree: Tree, window: int | None, scale: float, sinks_h: Tensor | None
) -> Tensor:
    """(1, h, N, d) the attention of every token to its ancestors and itself, within `window` if there is one."""
    grouped = k_1gNd.shape[1] != q_1hNd.shape[1]
    mask = tree.blocks(window)
    assert isinstance(mask, BlockMask)
    out_1hNd, lse_1hN = compiled()(
        q_1hNd,
        k_1gNd,
        v_1gNd,
        block_mask=mask,
        scale=scale,
        enable_gqa=grouped,
        return_lse=True,
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},  # its kernel for decoding refuses our blocks
    )
    if sinks_h is not None:  # a logit without a value
        share_1hN = torch.sigmoid(lse_1hN - sinks_h[None, :, None].float())
        out_1hNd = out_1hNd * share_1hN[..., None].to(out_1hNd.dtype)
    found: Tensor = out_1hNd
    return found


@cache
def compiled() -> Callable[..., Any]:
    """FlexAttention, compiled once for any number of tokens."""
    return torch.compile(flex_attention, dynamic=True)


def takes_sequences(q_1hNd: Tensor, v_1gNd: Tensor, tree: Tree, sinks_h: Tensor | None) -> bool:
    """Whether `sequences` can compute this: 16 bits on a GPU, and no token in two sequences."""
    flash = q_1hNd.device.type == "cuda" and fits_flash(q_1hNd) and v_1gNd.shape[-1] == q_1hNd.shape[-1]
    return flash and sinks_h is None and all(c.parent < 0 for c in tree.chains)


def sequences(q_1hNd: Tensor, k_1gNd: Tensor, v_1gNd: Tensor, tree: Tree, window: int | None, scale: float) -> Tensor:
    """(1, h, N, d) causal attention within each sequence, by one call of flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    starts, longest = tree.sequence_starts()
    q_Nhd, k_Ngd, v_Ngd = (x[0].transpose(0, 1) for x in (q_1hNd, k_1gNd, v_1gNd))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in signature(varlen_attn).parameters:
        options["enable_gqa"] = k_Ngd.shape[1] != q_Nhd.shape[1]
    else:  # torch before 2.12
        k_Ngd, v_Ngd = (x.repeat_interleave(q_Nhd.shape[1] // x.shape[1], 1) for x in (k_Ngd, v_Ngd))
    out_Nhd = varlen_attn(q_Nhd, k_Ngd, v_Ngd, starts, starts, longest, longest, **options)
    assert isinstance(out_Nhd, Tensor)
    return out_Nhd.transpose(0, 1)[None]
