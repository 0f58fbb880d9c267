"""Exact attention along a forest as the sum of its pieces (pieces.py), with a backward pass of its own.

Every piece is one call of a kernel. Outputs are merged by their log-sum-exp; memory is linear in the tokens. On a CPU,
16-bit heads are computed in float32 where there are several pieces, so that only their merged output is rounded. An
attention sink is a logit without a value, so it only enlarges the log-sum-exp. h: query heads, g: key and value heads,
d: head size, N: tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from agentrl.trainer.attention.kernels import HALF, Grads, Part, kernel_for
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


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries, keys and values of a forest, and the attention to compute."""

    q: Tensor
    k: Tensor
    v: Tensor
    tree: Tree
    window: int | None
    scale: float

    def attend(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp of one piece."""
        return kernel_for(self.q, piece.masked).forward(self._part(piece))

    def gradients(self, grad: Tensor, out: Tensor, lse: Tensor, piece: Piece) -> Grads:
        """The gradients of one piece's queries, keys and values, from the merged output and log-sum-exp."""
        of_queries = (x[:, :, piece.query : piece.query_stop] for x in (grad, out, lse))
        return kernel_for(self.q, piece.masked).backward(self._part(piece), *of_queries)

    def _part(self, piece: Piece) -> Part:
        queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
        mask_QK = self.tree.mask(piece, self.window, self.q.dtype) if piece.masked else None
        return Part(self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys], piece.causal, mask_QK, self.scale)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks_h: Tensor | None, tree: Tree, window: int | None, scale: float
    ) -> Tensor:
        cut = tree.pieces(window)
        if len(cut) == 1:
            out, lse = _Heads(q, k, v, tree, window, scale).attend(cut[0])
        else:
            out, lse = _merged(_Heads(_unrounded(q), _unrounded(k), _unrounded(v), tree, window, scale), cut)
        if sinks_h is not None:
            with_sink = torch.logaddexp(lse, sinks_h.to(lse.dtype)[None, :, None])
            out = out * (lse - with_sink).exp()[..., None]
            lse = with_sink
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks_h, out, lse)
        ctx.tree, ctx.window, ctx.scale = tree, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_h, out, lse = ctx.saved_tensors
        (grad,) = grads
        attention = ctx.tree, ctx.window, ctx.scale
        cut: Sequence[Piece] = ctx.tree.pieces(ctx.window)
        if len(cut) == 1:
            dq, dk, dv = _Heads(q, k, v, *attention).gradients(grad, out, lse, cut[0])
        else:
            heads = _Heads(_unrounded(q), _unrounded(k), _unrounded(v), *attention)
            dq, dk, dv = _summed_gradients(heads, _unrounded(grad), _unrounded(out), lse, cut)
        dsinks = None
        if sinks_h is not None:
            # The sink's value is 0, so its score has the gradient −p · Σ_d grad · out.
            p_1hN = (sinks_h.to(lse.dtype)[None, :, None] - lse).exp()
            dsinks = -(p_1hN * (grad * out).sum(-1)).sum((0, 2)).to(sinks_h.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _unrounded(x: Tensor) -> Tensor:
    """The tensor in the type of its kernels."""
    return x.float() if x.dtype in HALF and x.device.type == "cpu" else x


def _sum(x: Tensor) -> Tensor:
    """Memory for a sum in the shape of `x`, in float32 for 16-bit tensors. Own pieces fill it; the others add."""
    return torch.empty_like(x, dtype=x.dtype if x.dtype == torch.float64 else torch.float32)


def _merged(heads: _Heads, cut: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all pieces."""
    sums = _sum(heads.q)
    lse_1hN = torch.empty(sums.shape[:-1], dtype=sums.dtype, device=sums.device)
    for piece in cut:
        queries = slice(piece.query, piece.query_stop)
        out, part = heads.attend(piece)
        if piece.own:
            sums[:, :, queries], lse_1hN[:, :, queries] = out, part
            continue
        before, old = lse_1hN[:, :, queries], sums[:, :, queries]
        both = torch.logaddexp(before, part)
        old *= (before - both).exp_()[..., None]
        old += out * (part - both).exp_()[..., None]
        lse_1hN[:, :, queries] = both
    return sums, lse_1hN


def _summed_gradients(heads: _Heads, grad: Tensor, out: Tensor, lse: Tensor, cut: Sequence[Piece]) -> Grads:
    """The gradients of queries, keys and values over all pieces."""
    sums = _sum(heads.q), _sum(heads.k), _sum(heads.v)
    for piece in cut:
        queries, keys = slice(piece.query, piece.query_stop), slice(piece.key, piece.key_stop)
        found = heads.gradients(grad, out, lse, piece)
        for total, part, gradient in zip(sums, (queries, keys, keys), found, strict=True):
            if piece.own:
                total[:, :, part] = gradient
            else:
                total[:, :, part] += gradient
    return sums
