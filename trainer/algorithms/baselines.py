"""The baselines that are subtracted from the returns of a group's episodes.

n: episodes of a group, two or more; their returns differ.
"""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float64
from agentrl.domain.ties import tied

EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""


def standard_scores(values: Float64) -> Float64:
    """(n,) (x − mean x) / (std x + ε), with the sample standard deviation; zeros where all are equal."""
    if tied(values.tolist()):
        return np.zeros_like(values)
    scores: Float64 = (values - values.mean()) / (values.std(ddof=1) + EPSILON)
    return scores


def baselines(returns: Float64, tokens: Float64, algorithm: Algorithm, greedy: float | None = None) -> Float64:
    """(n,) the baseline of each episode, from the returns (n,), the numbers of loss tokens (n,) and the return of the
    group's greedy episode.

    group_mean       mean(R). DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    leave_one_out    the mean of the other R_j. "Back to Basics", arXiv 2402.14740.
    length_weighted  Σ l_j R_j / Σ l_j. OPO, arXiv 2505.23585: the baseline of least variance, if a gradient's
                     squared norm grows with the length l.
    max_at_k         `max_at_k`.
    greedy           that of the greedy episode. ReMax, arXiv 2310.10505: b(x) = r(x, ā), ā_t ∈ argmax π.
    none             0.

    `baseline_shift` is added to all but `max_at_k`. AsymRE, arXiv 2506.20520: R − (V + δV).
    """
    match algorithm.baseline:
        case "group_mean":
            found = np.full_like(returns, returns.mean())
        case "leave_one_out":
            found = (returns.sum() - returns) / (len(returns) - 1)
        case "length_weighted":
            found = np.full_like(returns, tokens @ returns / tokens.sum() if tokens.any() else returns.mean())
        case "max_at_k":
            return max_at_k(returns, algorithm.best_of)
        case "greedy":
            if greedy is None:
                raise ValueError("baseline greedy needs the return of a greedy episode, which a group does not have")
            found = np.full_like(returns, greedy)
        case "none" | "critic":
            found = np.zeros_like(returns)
        case _:
            assert_never(algorithm.baseline)
    return found + algorithm.baseline_shift


def max_at_k(returns: Float64, k: int) -> Float64:
    """(n,) the baseline under which the policy gradient is that of the expected maximum of k episodes' returns.

    The advantage of an episode is k times the mean, over all choices of k − 1 other episodes, of what it adds to their
    maximum: max(0, R_i − max R_j). For returns of 0 and 1 the objective is pass@k. Where a group has fewer than k
    episodes, k is their number. PKPO, arXiv 2505.15201, eq. 33 (s^(loo−1)), times n, since the loss is a mean over
    episodes.
    """
    n = len(returns)
    k = min(k, n)
    order = np.argsort(returns, kind="stable")
    ascending = returns[order]
    ways = math.comb(n - 1, k - 1)
    # the share of choices of k − 1 others whose largest is the j-th smallest of the group, where all are below i
    shares = np.array([math.comb(j, k - 2) / ways for j in range(n)])
    below = np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    weighted = np.concatenate([[0.0], np.cumsum(shares * ascending)[:-1]])
    advantages = np.empty_like(returns)
    advantages[order] = k * (ascending * below - weighted)
    return returns - advantages
