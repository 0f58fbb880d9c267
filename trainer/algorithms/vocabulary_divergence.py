"""The divergence of a policy's distributions from a teacher's, and its derivatives by the policy's logits.

C: predictions, V: vocabulary, or the k tokens that are compared. K: recorded tokens. p: the policy, q: the teacher.
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


def recorded_kl(logits_CV: Tensor, ids_CK: Tensor, log_q_CK: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) the forward KL divergence from a teacher whose logprobs are known for some tokens only, and (C, V) its
    derivatives by the logits. Ids below 0 fill up rows; they count for nothing.

    D = Σ_k q_k (log q_k − log p_k) + q_r (log q_r − log p_r), r: all other tokens as one, q_r = 1 − Σ q_k;
    ∂D/∂z_v = p_v − q_v of a known token, p_v (1 − q_r / p_r) of another one. It is at most the divergence over the
    vocabulary (data processing), and 0 only where p has the teacher's probabilities of the known tokens. Divided by
    their sum instead, q claims that other tokens are impossible: a biased target ("Sparse Logit Sampling", arXiv
    2503.16870); compared only among themselves, p may give all others any probability. The tail as one token
    is that of SDPO, arXiv 2601.20802.
    """
    size = logits_CV.shape[1]
    known_CK = ids_CK >= 0
    places_CK = torch.where(known_CK, ids_CK, 0)
    marks_CV = torch.zeros(len(ids_CK), size + 1, dtype=torch.bool, device=logits_CV.device)
    inside_CV = marks_CV.scatter_(1, torch.where(known_CK, ids_CK, size), True)[:, :size]
    log_p_CV = torch.log_softmax(logits_CV, -1)
    log_q_CK = torch.where(known_CK, log_q_CK.to(logits_CV.dtype), -torch.inf)
    log_q_CK = log_q_CK - torch.logsumexp(log_q_CK, -1, keepdim=True).clamp(min=0)  # a sum is above 1 by rounding only
    q_CK = log_q_CK.exp()
    rest_C = torch.where(inside_CV.all(-1), 0, (1 - q_CK.sum(-1)).clamp(min=0))
    rest_p_C = torch.logsumexp(log_p_CV.masked_fill(inside_CV, -torch.inf), -1)
    gap_CK = torch.where(known_CK, log_q_CK - log_p_CV.gather(1, places_CK), 0)
    tail_C = torch.where(rest_C > 0, torch.xlogy(rest_C, rest_C) - rest_C * rest_p_C, 0)
    p_CV = log_p_CV.exp()
    q_CV = torch.zeros_like(p_CV).scatter_add_(1, places_CK, torch.where(known_CK, q_CK, 0))
    outside_CV = rest_C[:, None] * (log_p_CV - rest_p_C[:, None]).exp()
    return (q_CK * gap_CK).sum(-1) + tail_C, p_CV - torch.where(inside_CV, q_CV, outside_CV)


DIVERGENCES: dict[str, Divergence] = {
    "reverse": reverse_kl,
    "forward": forward_kl,
    "jensen_shannon": jensen_shannon,
}
"""For each value of `Algorithm.distill_divergence`."""
