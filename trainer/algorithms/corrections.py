"""Off-policy corrections for tokens that an older policy sampled: proximal logprobs, importance weights, masks."""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.bounds import bounded_exp
from agentrl.trainer.algorithms.packed_rows import Rows, at_level


def interpolated_proximal(logprobs_S: Tensor, behavior_S: Tensor, ages_S: Tensor, progress: float) -> Tensor:
    """(S,) log π_prox ≈ log π_behave + α (log π − log π_behave), α = (v_prox − v_behave) / (v − v_behave).

    `ages_S` is v_prox − v_behave, in versions. `progress` is v − v_prox, the share of the step's updates that are
    made. At progress 0 the current policy is the proximal one, and the formula returns its logprobs. This is AReaL's
    log-linear approximation (its documentation, "proximal log-probability approximation"), where progress is 1.
    """
    distance_S = ages_S + progress
    alpha_S = torch.where(distance_S > 0, ages_S / distance_S.clamp(min=1e-12), 1.0).to(logprobs_S.dtype)
    return behavior_S + alpha_S * (logprobs_S.detach() - behavior_S)


def behavior_weights(
    proximal_S: Tensor, behavior_S: Tensor, trajectories: Rows, turns: Rows, algorithm: Algorithm
) -> tuple[Tensor, Tensor]:
    """(S,) weight of each token's loss from w = π_prox/π_behave, and (S,) whether w is out of bounds.

    truncate  min(w, cap). Decoupled PPO: arXiv 2110.00641; with a cap: AReaL, arXiv 2505.24298, section 5.2.
    mask      w where floor ≤ w ≤ cap, else 0.
    reject    1 where floor ≤ w ≤ cap, else 0: leaves out tokens, whole turns or whole trajectories.
    """
    if algorithm.correction == "none":
        return torch.ones_like(behavior_S), torch.zeros_like(behavior_S, dtype=torch.bool)
    weight_S = bounded_exp(at_level(proximal_S - behavior_S, trajectories, turns, algorithm.correction_level))
    if algorithm.correction == "truncate":
        return weight_S.clamp(max=algorithm.correction_cap), weight_S > algorithm.correction_cap
    outside_S = (weight_S > algorithm.correction_cap) | (weight_S < algorithm.correction_floor)
    if algorithm.correction == "mask":
        kept_S = weight_S
    elif algorithm.correction == "reject":
        kept_S = torch.ones_like(weight_S)
    else:
        assert_never(algorithm.correction)
    return kept_S.masked_fill(outside_S, 0.0), outside_S


def second_moment_limit(log_ratio_S: Tensor, threshold: float) -> float:
    """The bound on (log ρ)² below which tokens are kept, so that the mean of kept ones is at most `threshold`.

    Takes all tokens of the minibatch, from all ranks. The largest are removed first, equal ones together. M2PO, arXiv
    2510.01161.
    """
    squares_S = log_ratio_S.double().square().sort().values
    means_S = squares_S.cumsum(0) / torch.ones_like(squares_S).cumsum(0)
    kept = int((means_S <= threshold).sum())
    return squares_S[kept].item() if kept < len(squares_S) else math.inf


def under_limit(log_ratio_S: Tensor, limit: float) -> Tensor:
    """(S,) bool, true for the tokens that `second_moment_limit` keeps."""
    return log_ratio_S.double().square() < limit
