"""Logprobs of given tokens from hidden states, over the vocabulary in chunks, so that memory stays bounded.

P: predictions, H: hidden size, V: vocabulary, C: predictions of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl.trainer.onednn import linear

CHUNK = 256
"""Predictions whose (C, V) logits exist at once."""


def token_logprobs(
    hidden_PH: Tensor, weight_VH: Tensor, targets_P: Tensor, temperatures_P: Tensor, chunk: int = CHUNK,
    *, entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log softmax(hidden · weightᵀ / temperature)[target], and that distribution's entropy. P >= 1.

    The entropy has a gradient only where that is asked for.
    """
    assert len(targets_P) > 0
    if weight_VH.requires_grad and torch.is_grad_enabled():
        return _checkpointed(hidden_PH, weight_VH, targets_P, temperatures_P, chunk, entropy_gradient)
    needs_grad = hidden_PH.requires_grad and torch.is_grad_enabled()
    logprobs_P, entropy_P = _FrozenHead.apply(  # type: ignore[no-untyped-call]
        hidden_PH, weight_VH, targets_P, temperatures_P, chunk, needs_grad, needs_grad and entropy_gradient
    )
    return logprobs_P, entropy_P


def _logits(hidden_CH: Tensor, weight_VH: Tensor, temperatures_C: Tensor) -> Tensor:
    return linear(hidden_CH, weight_VH).float().div_(temperatures_C[:, None])


class _FrozenHead(torch.autograd.Function):
    """With a frozen head the derivatives by the hidden state are known in the forward, so that logits never recur.

    d logprob = (W[target] − p·W) / T, d entropy = −(p (log p + entropy))·W / T.
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
        for start in range(0, len(targets_P), chunk):
            part = slice(start, start + chunk)
            log_p_CV = _logits(hidden_PH[part], weight_VH, temperatures_P[part])
            log_p_CV -= log_p_CV.logsumexp(-1, keepdim=True)
            logprobs_P[part] = log_p_CV.gather(-1, targets_P[part, None]).squeeze(-1)
            p_CV = log_p_CV.exp()
            entropy_P[part] = -torch.linalg.vecdot(p_CV, log_p_CV)
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


def _checkpointed(
    hidden_PH: Tensor, weight_VH: Tensor, targets_P: Tensor, temperatures_P: Tensor, chunk: int, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    def one(hidden_CH: Tensor, weight: Tensor, targets_C: Tensor, temperatures_C: Tensor) -> tuple[Tensor, Tensor]:
        log_p_CV = torch.log_softmax(_logits(hidden_CH, weight, temperatures_C), -1)
        with torch.set_grad_enabled(entropy_gradient):
            entropy_C = -torch.einsum("cv,cv->c", log_p_CV.exp(), log_p_CV)
        return log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1), entropy_C

    parts = [
        checkpoint(
            one, hidden_PH[s : s + chunk], weight_VH, targets_P[s : s + chunk], temperatures_P[s : s + chunk],
            use_reentrant=False,
        )
        for s in range(0, len(targets_P), chunk)
    ]  # fmt: skip
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
