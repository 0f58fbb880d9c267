"""The divergence from a reference policy, in the loss or in the reward."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentrl.trainer.algorithms.bounds import bounded_k3

Estimator = Literal["k1", "k2", "k3"]


def kl_divergence(logprobs_S: Tensor, reference_S: Tensor, estimator: Estimator) -> Tensor:
    """(S,) estimates of KL(π‖π_ref), from d = log π − log π_ref at tokens that π sampled.

    k1 = d, k2 = d²/2, k3 = min(exp(−d) − 1 + d, 10). Schulman, "Approximating KL divergence", 2020; k3: GRPO, arXiv
    2402.03300, eq. 4. As a loss only k2 has the divergence's own gradient; k1's is zero on average; k3's is zero at 10.
    """
    difference_S = logprobs_S - reference_S
    if estimator == "k1":
        return difference_S
    if estimator == "k2":
        return difference_S.square() / 2
    return bounded_k3(-difference_S)
