"""The gradient noise scale: the batch size at which noise and signal of a gradient are alike (McCandlish and others,
2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162).

A gradient of B samples has E|G_B|² = |G|² + tr(Σ)/B. The first microbatch and the whole minibatch have gradients at one
point of the weights with two sizes, from whose norms both follow without bias (appendix A.1):

    |G|²  = (B |G_B|² − b |G_b|²) / (B − b)
    tr(Σ) = (|G_b|² − |G_B|²) / (1/b − 1/B)

B_noise = tr(Σ)/|G|² (B_simple) is the ratio of their running averages: single estimates are noisy, and the ratio of two
unbiased estimates is biased.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

PART = "noise_scale"
"""Part of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one minibatch."""

    signal: float  # |G|²
    noise: float  # tr(Σ), per sample
    batch: float  # B, in samples


def estimate(small_norm: float, small: float, big_norm: float, big: float) -> Estimate:
    """From the norms of the mean gradients of `small` and of `big` > `small` samples."""
    assert 0 < small < big
    signal = (big * big_norm**2 - small * small_norm**2) / (big - small)
    noise = (small_norm**2 - big_norm**2) / (1 / small - 1 / big)
    return Estimate(signal, noise, big)


def rate_factor(noise_scale: float, batch: float, reference: float, power: float) -> float:
    """What a learning rate that fits batches of `reference` samples is multiplied by for batches of `batch`.

    The best rate of a batch of B is ε_max / (1 + B_noise/B) (section 2.2), so the factor is ((1 + B_noise/reference) /
    (1 + B_noise/batch))^power: 1 without noise, (batch/reference)^power with noise alone. For Adam the paper finds
    powers from 1/2 to 1.
    """
    return float(((1 + noise_scale / reference) / (1 + noise_scale / batch)) ** power)


@dataclass(slots=True)
class Estimates:
    """The estimates of one step."""

    found: list[Estimate] = field(default_factory=list)


class NoiseScale:
    """Running averages of signal, noise and batch size over the steps, divided by 1 − d^t as Adam's moments are."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.state = torch.zeros(4, dtype=torch.float64)
        """(4,) the averages of signal, noise and batch before the division, and 1 − d^t."""

    def add(self, of_step: Estimates) -> None:
        """Add a step's mean; nothing for a step without estimates."""
        if of_step.found:
            one = of_step.found
            means = [fmean(e.signal for e in one), fmean(e.noise for e in one), fmean(e.batch for e in one), 1.0]
            self.state.mul_(self._decay).add_(torch.tensor(means, dtype=torch.float64), alpha=1 - self._decay)

    @property
    def value(self) -> float | None:
        """B_noise in samples; None while it is not known: before the first step, or while noise hides the signal."""
        signal, noise, _, weight = self.state.tolist()
        return max(0.0, noise) / signal if weight and signal > 0 else None

    @property
    def batch(self) -> float:
        """The mean number of samples of a minibatch."""
        return float(self.state[2] / self.state[3])

    def factor(self, reference: float | None, power: float) -> float:
        """The factor of the learning rate (`rate_factor`); 1 without a reference, or while the scale is not known."""
        value = self.value
        return 1.0 if value is None or reference is None else rate_factor(value, self.batch, reference, power)

    def parts(self) -> dict[str, dict[str, Tensor]]:
        """Its part of a checkpoint."""
        return {PART: {"state": self.state}}
