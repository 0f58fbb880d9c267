"""Bounds differences of logprobs so that no loss, weight or gradient overflows.

Values within the bounds stay the same, bit for bit. At a bound the gradient is 0. Infinity and NaN stay: they are
errors of a forward pass, which the update reports (trainer/nonfinite.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Largest |log ρ| whose exponential is taken: ratios and weights lie within e^±20 (4.9e8), as in verl."""
LARGEST_K3 = 10.0
"""Largest value of the k3 estimator, as in verl and AReaL."""


def bounded(values: Tensor, bound: float) -> Tensor:
    """`values` clamped to ±`bound`; infinity and NaN stay."""
    return torch.where(values.isinf(), values, values.clamp(-bound, bound))


def bounded_exp(log_ratio_S: Tensor) -> Tensor:
    """(S,) e^x, x within ±LARGEST_LOG_RATIO."""
    return torch.exp(bounded(log_ratio_S, LARGEST_LOG_RATIO))


def k3(log_ratio_S: Tensor) -> Tensor:
    """(S,) e^x − 1 − x, x within ±LARGEST_LOG_RATIO: estimates KL(p‖q) from x = log q/p at tokens that p sampled."""
    x_S = bounded(log_ratio_S, LARGEST_LOG_RATIO)
    return torch.expm1(x_S) - x_S


def bounded_k3(log_ratio_S: Tensor) -> Tensor:
    """(S,) `k3`, at most LARGEST_K3, for losses and returns."""
    return bounded(k3(log_ratio_S), LARGEST_K3)
