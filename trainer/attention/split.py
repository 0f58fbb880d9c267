"""Exact attention along a forest as the sum of its pieces (pieces.py), with a backward pass of its own.

Every piece is one call of a kernel. Outputs are merged by their log-sum-exp; memory is linear in the tokens. An
attention sink is a logit without a value, so it only enlarges the log-sum-exp. h: query heads, g: key and value heads,
d: head size, N: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.trainer.attention.kernels import Kernel, kernel_for
from agentrl.trainer.attention.pieces import Piece
from agentrl.trainer.attention.tree import Tree


def split_attention(
    q_1hNd: Tensor, k_1gNd: Tensor, v_1gNd: Tensor, tree: Tree, window: int | None, scale: float, sinks_h: Tensor | None
) -> Tensor:
    """(1, h, N, d) the attention of every token to its ancestors and itself, within `window` if there is one."""
    size = v_1gNd.shape[-1]
    larger = q_1hNd.shape[-1] - size
    padded = pad(v_1gNd, (0, larger)) if larger else v_1gNd  # kernels take heads of one size
    out_1hNd: Tensor = _Split.apply(  # type: ignore[no-untyped-call]
        q_1hNd, k_1gNd, padded, sinks_h, tree, window, scale
    )
    return out_1hNd[..., :size]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_h: Tensor | None, tree: Tree, window: int | None, scale: float
    ) -> Tensor:
        cut = tree.pieces(window)
        if len(cut) == 1:
            out, lse = _attend(q, k, v, tree, cut[0], window, scale)
        else:
            out, lse = _merged(q, k, v, tree, cut, window, scale)
        if sinks_h is not None:
            with_sink = torch.logaddexp(lse, sinks_h.to(lse.dtype)[None, :, None])
            out = (out * (lse - with_sink).exp()[..., None]).to(q.dtype)
            lse = with_sink
        ctx.save_for_backward(q, k, v, sinks_h, out, lse)
        ctx.tree, ctx.window, ctx.scale = tree, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_h, out, lse = ctx.saved_tensors
        (grad,) = grads
        cut: Sequence[Piece] = ctx.tree.pieces(ctx.window)
        args = ctx.tree, ctx.window, ctx.scale
        if len(cut) == 1:
            dq, dk, dv = _gradients(grad, q, k, v, out, lse, cut[0], *args)
        else:
            dq, dk, dv = (_sum(x) for x in (q, k, v))
            for piece in cut:
                queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
                found = _gradients(grad, q, k, v, out, lse, piece, *args)
                for total, part, gradient in zip((dq, dk, dv), (queries, keys, keys), found, strict=True):
                    if piece.own:
                        total[:, :, part] = gradient
                    else:
                        total[:, :, part] += gradient
            dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        dsinks = None
        if sinks_h is not None:
            # The sink's value is 0, so its score has the gradient −p · Σ_d grad · out.
            p_1hN = (sinks_h.to(lse.dtype)[None, :, None] - lse).exp()
            dsinks = -(p_1hN * (grad * out).sum(-1)).sum((0, 2)).to(sinks_h.dtype)
        return dq, dk, dv, dsinks, None, None, None


def _sum(x: Tensor) -> Tensor:
    """Memory for a sum in the shape of `x`, in float32 for 16-bit tensors. Own pieces fill it; the others add."""
    return torch.empty_like(x, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)


def _kernel(q: Tensor, piece: Piece) -> Kernel:
    return kernel_for(q, piece.masked)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, piece: Piece, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
    mask_QK = tree.mask(piece, window, q.dtype) if piece.masked else None
    return _kernel(q, piece).forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], piece.causal, mask_QK, scale)


def _merged(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree, cut: Sequence[Piece], window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all pieces."""
    sums, lse = _sum(q), None
    for piece in cut:
        queries = slice(piece.query, piece.query_stop)
        out, part = _attend(q, k, v, tree, piece, window, scale)
        if lse is None:
            lse = torch.empty(q.shape[:-1], dtype=part.dtype, device=q.device)
        if piece.own:
            sums[:, :, queries], lse[:, :, queries] = out, part
            continue
        both = torch.logaddexp(lse[:, :, queries], part)
        old = sums[:, :, queries]
        old *= (lse[:, :, queries] - both).exp_()[..., None]
        old += out * (part - both).exp_()[..., None]
        lse[:, :, queries] = both
    assert lse is not None
    return sums.to(q.dtype), lse


def _gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    piece: Piece,
    tree: Tree,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
    mask_QK = tree.mask(piece, window, q.dtype) if piece.masked else None
    return _kernel(q, piece).backward(
        grad[:, :, queries],
        q[:, :, queries],
        k[:, :, keys],
        v[:, :, keys],
        out[:, :, queries],
        lse[:, :, queries],
        piece.causal,
        mask_QK,
        scale,
    )
