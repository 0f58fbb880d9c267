"""The divergence of a policy's distributions from a teacher's, and its derivatives by the policy's logits.

C: predictions, V: vocabulary, or the k tokens that are compared. p: the policy, q: the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(log p (C, V), log q (C, V)) → the divergence (C,), and its derivatives by the logits of p (C, V)."""


def reverse_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> tuple[Tensor, Tensor]:
    """D = Σ p (log p − log q); ∂D/∂z_v = p_v (log p_v − log q_v − D). It seeks the teacher's modes.

    On-policy: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649.
    """
    p_CV, gap_CV = log_p_CV.exp(), log_p_CV - log_q_CV
    found_C = (p_CV * gap_CV).sum(-1)
    return found_C, p_CV * (gap_CV - found_C[:, None])


def forward_kl(log_p_CV: Tensor, log_q_CV: Tensor) -> tuple[Tensor, Tensor]:
    """D = Σ q (log q − log p); ∂D/∂z_v = p_v − q_v. It covers the teacher's modes. arXiv 1503.02531 (Hinton)."""
    q_CV = log_q_CV.exp()
    return (q_CV * (log_q_CV - log_p_CV)).sum(-1), log_p_CV.exp() - q_CV


def jensen_shannon(log_p_CV: Tensor, log_q_CV: Tensor) -> tuple[Tensor, Tensor]:
    """D = ½ KL(q ‖ m) + ½ KL(p ‖ m), m = ½(p + q); ∂D/∂z_v = ½ p_v (log p_v − log m_v − KL(p ‖ m)). At most log 2.

    GKD, arXiv 2306.13649, eq. 1 with β = ½.
    """
    log_m_CV = torch.logaddexp(log_p_CV, log_q_CV) - math.log(2)
    p_CV, gap_CV = log_p_CV.exp(), log_p_CV - log_m_CV
    own_C = (p_CV * gap_CV).sum(-1)
    teachers_C = (log_q_CV.exp() * (log_q_CV - log_m_CV)).sum(-1)
    return (own_C + teachers_C) / 2, p_CV * (gap_CV - own_C[:, None]) / 2


DIVERGENCES: dict[str, Divergence] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "jensen_shannon": jensen_shannon,
}
"""For each value of `Algorithm.distill_divergence`."""
