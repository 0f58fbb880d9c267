"""Estimates the KL divergence from a reference policy, for the loss or for the reward, and controls its weight."""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float32
from agentrl.trainer.algorithms.bounds import LARGEST_LOG_RATIO, bounded, bounded_k3

Estimator = Literal["k1", "k2", "k3", "k1+", "k3+"]


def kl_divergence(logprobs_S: Tensor, reference_S: Tensor, estimator: Estimator) -> Tensor:
    """(S,) estimates of KL(π‖π_ref), from d = log π − log π_ref at tokens that π sampled.

    k1 = d, k2 = d²/2, k3 = min(exp(−d) − 1 + d, 10). Schulman, "Approximating KL divergence", 2020; k3: GRPO, arXiv
    2402.03300, eq. 4. As a loss, only k2 has the gradient of the divergence. The gradient of k1 is zero on average, and
    that of k3 is zero at 10. k1+ and k3+ have the value of k1 and k3 and the gradient of k2 (verl, `kl_penalty`).
    """
    difference_S = logprobs_S - reference_S
    if estimator == "k1+" or estimator == "k3+":
        gradient_S = difference_S.square() / 2
        value_S = difference_S if estimator == "k1+" else bounded_k3(-difference_S)
        return value_S.detach() + (gradient_S - gradient_S.detach())
    if estimator == "k1":
        return difference_S
    if estimator == "k2":
        return difference_S.square() / 2
    if estimator == "k3":
        return bounded_k3(-difference_S)
    assert_never(estimator)


def taught_advantages(advantages_T: Float32, logprobs_T: Float32, teacher_T: Float32, algorithm: Algorithm) -> Float32:
    """(T,) A − c (log π − log π_teacher): the reverse KL divergence of each token as its own cost, not that of later
    tokens. A itself where the teacher's logprob is NaN, and where both logprobs are 0.

    The gradient at π is that of E[Σ_t KL_t] with the states that π visits held fixed. GKD, arXiv 2306.13649, which also
    leaves out the dependence of states on π; "On-Policy Distillation", Thinking Machines Lab, 2025.
    """
    gap_T = torch.from_numpy(logprobs_T) - torch.from_numpy(teacher_T)
    cost_T: Float32 = (algorithm.distill_coef * bounded(gap_T, LARGEST_LOG_RATIO)).numpy()
    return np.where(np.isnan(teacher_T), advantages_T, advantages_T - cost_T)


LARGEST_ERROR = 0.2
LARGEST_COEFFICIENT = 1e6


def adapted(coefficient: float, divergence: float, target: float, gain: float) -> float:
    """The weight of the divergence for the next step: β (1 + gain · e), e = clip(divergence / target − 1, ±0.2).

    Fine-Tuning Language Models from Human Preferences, arXiv 1909.08593, section 2.2, where the gain is 0.1. verl's and
    TRL's gain is episodes of a step / horizon.
    """
    error = min(max(divergence / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return min(coefficient * (1 + gain * error), LARGEST_COEFFICIENT)
