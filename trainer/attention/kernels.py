"""Kernels that attend to a part of the keys and can be merged: each returns its output and its log-sum-exp.

The softmax over all keys is the mean of the softmaxes over parts, weighted by exp(log-sum-exp). For the backward pass a
kernel gets the merged output and log-sum-exp in place of its own: the probabilities exp(logit − log-sum-exp) are then
those among all keys (FlashAttention-2, arXiv:2307.08691, sections 2.2 and 3.1).

    CPU                              PyTorch's flash attention, with or without a mask
    GPU, 16-bit, no mask             PyTorch's flash attention
    otherwise                        matrix products and a softmax in float32, for one head group and tile after another

h: query heads, g: key and value heads, Q: queries, K: keys, d: head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SCORES = 2**24
"""Largest number of scores that the kernel of matrix products holds at once."""

Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


class Kernel(Protocol):
    """Attention of queries (1, h, Q, d) to keys and values (1, g, K, d), where g divides h."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask_QK: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The output (1, h, Q, d) and the log-sum-exp (1, h, Q). `mask_QK` is additive."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask_QK: Tensor | None,
        scale: float,
    ) -> Grads:
        """The gradients, given those of the output, and the merged output and log-sum-exp."""


class CpuFlash:
    """PyTorch's flash attention on a CPU."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask_QK: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask_QK, scale=scale
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask_QK: Tensor | None,
        scale: float,
    ) -> Grads:
        """See Kernel."""
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask_QK, scale=scale
        )
        return dq, dk, dv


class GpuFlash:
    """PyTorch's flash attention on a GPU. It takes no mask."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask_QK: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        assert mask_QK is None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask_QK: Tensor | None,
        scale: float,
    ) -> Grads:
        """See Kernel."""
        no_lengths, no_dropout = None, torch.zeros(2, dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),  # the kernel reads it by its address alone
            no_lengths,
            no_lengths,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        return dq, dk, dv


class Products:
    """Matrix products and a softmax, in float32 (float64 for float64), for at most SCORES scores at once."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask_QK: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=_wide(q).dtype, device=q.device)
        for heads, group, rows in _tiles(q, k):
            scores_rQK = _scores(q[0, heads, rows], k[0, group], causal, mask_QK, rows, scale)
            lse[0, heads, rows] = scores_rQK.logsumexp(-1)
            p_rQK = scores_rQK.sub_(lse[0, heads, rows, None]).exp_()
            out[0, heads, rows] = (p_rQK @ _wide(v[0, group])).to(q.dtype)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        mask_QK: Tensor | None,
        scale: float,
    ) -> Grads:
        """See Kernel."""
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
        for heads, group, rows in _tiles(q, k):
            wide_q, wide_grad = _wide(q[0, heads, rows]), _wide(grad[0, heads, rows])
            scores_rQK = _scores(q[0, heads, rows], k[0, group], causal, mask_QK, rows, scale)
            p_rQK = scores_rQK.sub_(lse[0, heads, rows, None]).exp_()
            dv[0, group] += (p_rQK.transpose(1, 2) @ wide_grad).sum(0)
            mean_rQ = (wide_grad * _wide(out[0, heads, rows])).sum(-1, keepdim=True)
            slope_rQK = (wide_grad @ _wide(v[0, group]).t()).sub_(mean_rQ).mul_(p_rQK).mul_(scale)
            dq[0, heads, rows] = (slope_rQK @ _wide(k[0, group])).to(q.dtype)
            dk[0, group] += (slope_rQK.transpose(1, 2) @ wide_q).sum(0)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


CPU_FLASH, GPU_FLASH, PRODUCTS = CpuFlash(), GpuFlash(), Products()


def kernel_for(q: Tensor, masked: bool) -> Kernel:
    """The fastest kernel for queries of this type and device."""
    if q.device.type == "cpu":
        return CPU_FLASH
    return GPU_FLASH if q.dtype in HALF and not masked and q.shape[-1] % 8 == 0 else PRODUCTS


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _tiles(q: Tensor, k: Tensor) -> list[tuple[slice, int, slice]]:
    """The query heads of each key head, that key head, and a range of queries."""
    heads, queries = q.shape[1:3]
    ratio = heads // k.shape[1]
    step = max(1, SCORES // max(1, ratio * k.shape[2]))
    return [
        (slice(group * ratio, (group + 1) * ratio), group, slice(at, min(at + step, queries)))
        for group in range(k.shape[1])
        for at in range(0, queries, step)
    ]


def _scores(q_rQd: Tensor, k_Kd: Tensor, causal: bool, mask_QK: Tensor | None, rows: slice, scale: float) -> Tensor:
    """(r, Q, K) logits of the heads that share a key head."""
    scores_rQK: Tensor = (_wide(q_rQd) @ _wide(k_Kd).t()).mul_(scale)
    if causal:
        i_Q = torch.arange(rows.start, rows.stop, device=q_rQd.device)
        later_QK = torch.arange(len(k_Kd), device=q_rQd.device)[None, :] > i_Q[:, None]
        scores_rQK.masked_fill_(later_QK, torch.finfo(scores_rQK.dtype).min)
    if mask_QK is not None:
        scores_rQK += mask_QK[rows]
    return scores_rQK
