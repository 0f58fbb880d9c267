"""Logprobs of given tokens from hidden states, computed in chunks of predictions to bound memory.

P: predictions, H: hidden size, V: vocabulary, C: predictions of one chunk. p: the distribution at the temperature T.

    d logprob[t] / d logit[v] = (1[v = t] − p[v]) / T        d entropy / d logit[v] = −p[v] (log p[v] + entropy) / T
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from agentrl.trainer.models.onednn import add_weight_gradient, linear

CHUNK = 256
"""Largest number of predictions whose (C, V) logits are computed at once."""
LOGITS_BYTES = 256 * 2**20
"""Largest size of those logits, unless one prediction has more."""
KEPT_BYTES = 512 * 2**20
"""Bytes of a trained head's distributions that are kept for the backward pass; the rest is computed again."""


def token_logprobs(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    targets_P: Tensor,
    temperatures_P: Tensor,
    chunk: int | None = None,
    *,
    entropy_gradient: bool = False,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden · weightᵀ / temperature)[target], and that distribution's entropy, in float32. P >= 1.

    The entropy has a gradient only with `entropy_gradient`. `chunk` predictions are computed at once; None: as many as
    memory is set apart for.
    """
    assert len(targets_P) > 0
    chunk = chunk_of(len(weight_VH)) if chunk is None else chunk
    if weight_VH.requires_grad and torch.is_grad_enabled():
        logprobs_P, entropy_P = _TrainedHead.apply(  # type: ignore[no-untyped-call]
            hidden_PH, weight_VH, targets_P, temperatures_P, chunk, entropy_gradient, kept_bytes
        )
        return logprobs_P, entropy_P
    needs_grad = hidden_PH.requires_grad and torch.is_grad_enabled()
    logprobs_P, entropy_P = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, targets_P, temperatures_P, chunk, needs_grad, needs_grad and entropy_gradient
    )
    return logprobs_P, entropy_P


def chunk_of(vocabulary: int) -> int:
    """The number of predictions of a chunk, by the bytes of their float32 logits: memory does not grow with the
    vocabulary, until one prediction's logits are more than LOGITS_BYTES.
    """
    return max(1, min(CHUNK, LOGITS_BYTES // (4 * vocabulary)))


def chunks(predictions: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` predictions."""
    return (slice(start, start + size) for start in range(0, predictions, size))


def head_of(weight_VH: Tensor) -> Tensor:
    """The head for `logits_of`: on a CPU a float32 copy, because a CPU rounds products of bfloat16 matrices."""
    return weight_VH.float() if weight_VH.device.type == "cpu" else weight_VH


def logits_of(hidden_CH: Tensor, head_VH: Tensor) -> Tensor:
    """(C, V) logits, summed and kept in float32: a bfloat16 logit of size 16 would be off by up to 0.06."""
    if head_VH.dtype == torch.float32:
        return linear(hidden_CH.float(), head_VH)
    logits_CV: Tensor = torch.mm(hidden_CH, head_VH.t(), out_dtype=torch.float32)
    return logits_CV


def _log_p(hidden_CH: Tensor, head_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    """(C, V) log probabilities, float32."""
    logits_CV = logits_of(hidden_CH, head_VH).div_(temperatures_C[:, None])
    log_p_CV: Tensor = torch.ops.aten._log_softmax.out(logits_CV, -1, False, out=logits_CV)  # row by row, in place
    return log_p_CV


def _chosen(log_p_CV: Tensor, targets_C: Tensor) -> Tensor:
    return log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1)


class _TrainedHead(torch.autograd.Function):
    """A head that trains. The weight's gradient needs the distributions again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        targets_P: Tensor,
        temperatures_P: Tensor,
        chunk: int,
        entropy_gradient: bool,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_P = torch.empty(len(targets_P), dtype=torch.float32, device=hidden_PH.device)
        entropy_P = torch.empty_like(logprobs_P)
        kept: dict[int, Tensor] = {}
        room, head_VH = kept_bytes, head_of(weight_VH)
        for part in chunks(len(targets_P), chunk):
            log_p_CV = _log_p(hidden_PH[part], head_VH, temperatures_P[part])
            logprobs_P[part] = _chosen(log_p_CV, targets_P[part])
            entropy_P[part] = -log_p_CV.exp().mul_(log_p_CV).sum(-1)
            if (room := room - log_p_CV.nbytes) >= 0:
                kept[part.start] = log_p_CV
        ctx.save_for_backward(hidden_PH, weight_VH, targets_P, temperatures_P, entropy_P)
        ctx.kept, ctx.chunk, ctx.entropy_gradient = kept, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, targets_P, temperatures_P, entropy_P = ctx.saved_tensors
        grad_P, entropy_grad_P = (grad / temperatures_P for grad in grads)
        grad_PH = torch.empty_like(hidden_PH)
        grad_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        head_VH = None
        for part in chunks(len(targets_P), ctx.chunk):
            log_p_CV = ctx.kept.pop(part.start, None)
            if log_p_CV is None:
                head_VH = head_of(weight_VH) if head_VH is None else head_VH
                log_p_CV = _log_p(hidden_PH[part], head_VH, temperatures_P[part])
            if ctx.entropy_gradient:
                p_CV = log_p_CV.exp()
                slope_CV = log_p_CV.add_(entropy_P[part, None]).mul_(-entropy_grad_P[part, None])
                slope_CV.sub_(grad_P[part, None]).mul_(p_CV)
            else:
                slope_CV = log_p_CV.exp_().mul_(-grad_P[part, None])
            slope_CV.scatter_add_(-1, targets_P[part, None], grad_P[part, None])
            slope_CV = slope_CV.to(weight_VH.dtype)
            grad_PH[part] = linear(slope_CV, weight_VH.t())
            add_weight_gradient(grad_VH, slope_CV, hidden_PH[part])
        return grad_PH, grad_VH.to(weight_VH.dtype), *[None] * 5


class _FrozenHead(torch.autograd.Function):
    """A head that does not train. Its forward pass computes the derivatives by the hidden state as well.

    They are the derivatives by the logits (above) times the weight, so the backward pass needs no logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        targets_P: Tensor,
        temperatures_P: Tensor,
        chunk: int,
        needs_grad: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_P = torch.empty(len(targets_P), dtype=torch.float32, device=hidden_PH.device)
        entropy_P = torch.empty_like(logprobs_P)
        slope_PH = torch.empty_like(hidden_PH) if needs_grad else None
        entropy_slope_PH = torch.empty_like(hidden_PH) if entropy_gradient else None
        head_VH = head_of(weight_VH)
        for part in chunks(len(targets_P), chunk):
            log_p_CV = _log_p(hidden_PH[part], head_VH, temperatures_P[part])
            logprobs_P[part] = _chosen(log_p_CV, targets_P[part])
            p_CV = log_p_CV.exp()
            entropy_P[part] = -(log_p_CV * p_CV).sum(-1)
            if slope_PH is not None:
                mean_CH = linear(p_CV.to(weight_VH.dtype), weight_VH.t())
                slope_PH[part] = (weight_VH[targets_P[part]] - mean_CH) / temperatures_P[part, None]
            if entropy_slope_PH is not None:
                slope_CV = p_CV.mul_(log_p_CV.add_(entropy_P[part, None])).neg_()
                toward_CH = linear(slope_CV.to(weight_VH.dtype), weight_VH.t())
                entropy_slope_PH[part] = toward_CH / temperatures_P[part, None]
        if slope_PH is not None:
            ctx.save_for_backward(slope_PH, entropy_slope_PH)
        if entropy_slope_PH is None:
            ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slope_PH, entropy_slope_PH = ctx.saved_tensors
        grad_PH = grads[0][:, None] * slope_PH
        if entropy_slope_PH is not None:
            grad_PH = grad_PH + grads[1][:, None] * entropy_slope_PH
        return grad_PH.to(slope_PH.dtype), *[None] * 6
