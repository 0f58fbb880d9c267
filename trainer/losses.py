"""The policy loss: the decoupled PPO objective over behaviour, proximal and current policy.

S: loss tokens of one microbatch. Sums, not means: the caller divides by the loss tokens of the whole batch, so that
gradients do not depend on how the batch was cut into microbatches and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

Sums = dict[str, Tensor]
"""Sums over loss tokens, by metric name; 0-dim float64."""


def decoupled_policy_loss(
    logprobs_S: Tensor,
    proximal_S: Tensor,
    behavior_S: Tensor,
    advantages_S: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    behavior_weight_cap: float,
) -> tuple[Tensor, Sums]:
    """Σ_t w_t · max(−A_t ρ_t, −A_t clip(ρ_t, 1−ε, 1+ε_high)), with ρ = π/π_prox and w = min(π_prox/π_behave, cap).

    The trust region is around the proximal policy (the one just before this step); the truncated weight corrects for
    the older policy that sampled. Hilton et al., arXiv 2110.00641; with a cap, AReaL, arXiv 2505.24298, section 5.2.
    """
    ratio_S = torch.exp(logprobs_S - proximal_S)
    raw_weight_S = torch.exp(proximal_S - behavior_S)
    weight_S = raw_weight_S.clamp(max=behavior_weight_cap)
    plain_S = -advantages_S * ratio_S
    clipped_S = -advantages_S * ratio_S.clamp(1 - eps_low, 1 + eps_high)
    loss = (weight_S * torch.maximum(plain_S, clipped_S)).sum()
    with torch.no_grad():
        log_ratio_S = (logprobs_S - behavior_S).double()
        sums: Sums = {
            "loss": loss.double(),
            "clip_fraction": (clipped_S > plain_S).double().sum(),
            "behavior_weight": weight_S.double().sum(),
            "behavior_weight_capped": (raw_weight_S > behavior_weight_cap).double().sum(),
            "approx_kl": (torch.expm1(log_ratio_S) - log_ratio_S).sum(),
        }
    return loss, sums


def mismatch_sums(proximal_S: Tensor, behavior_S: Tensor, versions_S: Tensor, version: int) -> Sums:
    """Σ|behaviour − recomputed| logprob: of tokens that `version` sampled (mismatch), of older ones (drift)."""
    gap_S = (proximal_S - behavior_S).abs().double()
    current_S = versions_S == version
    return {
        "mismatch": gap_S[current_S].sum(),
        "mismatch_tokens": current_S.double().sum(),
        "drift": gap_S[~current_S].sum(),
        "drift_tokens": (~current_S).double().sum(),
    }
