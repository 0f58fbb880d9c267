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

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
"""Largest head of flash attention on a GPU."""
SCORES = 2**24
"""Largest number of scores that the kernel of matrix products holds at once."""

Grads = tuple[Tensor, Tensor, Tensor]
"""Gradients of queries, keys and values."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries, and the keys that they attend to; g divides h."""

    q: Tensor  # (1, h, Q, d)
    k: Tensor  # (1, g, K, d)
    v: Tensor  # (1, g, K, d)
    causal: bool  # query i sees keys up to i only
    mask_QK: Tensor | None  # additive
    scale: float


class Kernel(Protocol):
    """One way to compute the attention of a part."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """The output (1, h, Q, d) and the log-sum-exp (1, h, Q)."""

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """The gradients, given that of the output, and the merged output and log-sum-exp."""


class CpuFlash:
    """PyTorch's flash attention on a CPU."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            part.q, part.k, part.v, 0.0, part.causal, attn_mask=part.mask_QK, scale=part.scale
        )
        return out, lse

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """See Kernel."""
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, part.q, part.k, part.v, out, lse, 0.0, part.causal, attn_mask=part.mask_QK, scale=part.scale
        )
        return dq, dk, dv


class GpuFlash:
    """PyTorch's flash attention on a GPU. It takes no mask."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        assert part.mask_QK is None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            part.q, part.k, part.v, 0.0, part.causal, scale=part.scale
        )
        return out, lse

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """See Kernel."""
        no_lengths, no_dropout = None, torch.zeros(2, dtype=torch.uint64, device=grad.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            part.q,
            part.k,
            part.v,
            out,
            lse.contiguous(),  # the kernel reads it by its address alone
            no_lengths,
            no_lengths,
            part.q.shape[2],
            part.k.shape[2],
            0.0,
            part.causal,
            no_dropout,
            no_dropout,
            scale=part.scale,
        )
        return dq, dk, dv


class Products:
    """Matrix products and a softmax, in float32 (float64 for float64), for at most SCORES scores at once."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        q, k, v = part.q, part.k, part.v
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=_wide(q).dtype, device=q.device)
        for heads, group, rows in _tiles(q, k):
            scores_rQK = _scores(part, heads, group, rows)
            lse[0, heads, rows] = scores_rQK.logsumexp(-1)
            p_rQK = scores_rQK.sub_(lse[0, heads, rows, None]).exp_()
            out[0, heads, rows] = (p_rQK @ _wide(v[0, group])).to(q.dtype)
        return out, lse

    def backward(self, part: Part, grad: Tensor, out: Tensor, lse: Tensor) -> Grads:
        """See Kernel."""
        q, k, v = part.q, part.k, part.v
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(_wide(k)), torch.zeros_like(_wide(v))
        for heads, group, rows in _tiles(q, k):
            wide_q, wide_grad = _wide(q[0, heads, rows]), _wide(grad[0, heads, rows])
            scores_rQK = _scores(part, heads, group, rows)
            p_rQK = scores_rQK.sub_(lse[0, heads, rows, None]).exp_()
            dv[0, group] += (p_rQK.transpose(1, 2) @ wide_grad).sum(0)
            mean_rQ = (wide_grad * _wide(out[0, heads, rows])).sum(-1, keepdim=True)
            slope_rQK = (wide_grad @ _wide(v[0, group]).t()).sub_(mean_rQ).mul_(p_rQK).mul_(part.scale)
            dq[0, heads, rows] = (slope_rQK @ _wide(k[0, group])).to(q.dtype)
            dk[0, group] += (slope_rQK.transpose(1, 2) @ wide_q).sum(0)
        return dq, dk.to(k.dtype), dv.to(v.dtype)


CPU_FLASH, GPU_FLASH, PRODUCTS = CpuFlash(), GpuFlash(), Products()


def kernel_for(q: Tensor, masked: bool) -> Kernel:
    """The fastest kernel for queries of this type and device."""
    if q.device.type == "cpu":
        return CPU_FLASH
    return GPU_FLASH if not masked and fits_flash(q) else PRODUCTS


def fits_flash(q: Tensor) -> bool:
    """Whether flash attention of a GPU takes queries of this type and head size."""
    return q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_HEAD


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


def _scores(part: Part, heads: slice, group: int, rows: slice) -> Tensor:
    """(r, Q, K) logits of a range of queries, of the heads that share a key head."""
    k_Kd = part.k[0, group]
    scores_rQK: Tensor = (_wide(part.q[0, heads, rows]) @ _wide(k_Kd).t()).mul_(part.scale)
    if part.causal:
        i_Q = torch.arange(rows.start, rows.stop, device=k_Kd.device)
        later_QK = torch.arange(len(k_Kd), device=k_Kd.device)[None, :] > i_Q[:, None]
        scores_rQK.masked_fill_(later_QK, torch.finfo(scores_rQK.dtype).min)
    if part.mask_QK is not None:
        scores_rQK += part.mask_QK[rows]
    return scores_rQK
