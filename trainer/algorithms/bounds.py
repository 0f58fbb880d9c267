"""How far a difference of log probabilities counts, so that no loss, weight or gradient overflows.

Within the bounds nothing changes, bit for bit; at one the gradient is 0. What is infinite or NaN stays so: that is a
fault of a forward pass, which the update reports (trainer/nonfinite.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Largest |log ρ| whose exponential is taken: ratios and weights lie within e^±20 (4.9e8), as in verl."""
LARGEST_K3 = 10.0
"""Largest value of the k3 estimator, as in verl and AReaL."""


def bounded(values: Tensor, bound: float) -> Tensor:
    """`values` within ±`bound`; those that are not finite as they are."""
    return torch.where(values.isinf(), values, values.clamp(-bound, bound))


def bounded_exp(log_ratio_S: Tensor) -> Tensor:
    """(S,) e^x, x within ±LARGEST_LOG_RATIO."""
    return torch.exp(bounded(log_ratio_S, LARGEST_LOG_RATIO))


def k3(log_ratio_S: Tensor) -> Tensor:
    """(S,) e^x − 1 − x, x within ±LARGEST_LOG_RATIO: of x = log q/p at tokens that p sampled, it estimates KL(p‖q)."""
    x_S = bounded(log_ratio_S, LARGEST_LOG_RATIO)
    return torch.expm1(x_S) - x_S


def bounded_k3(log_ratio_S: Tensor) -> Tensor:
    """(S,) the same, at most LARGEST_K3: for losses and returns."""
    return bounded(k3(log_ratio_S), LARGEST_K3)
