"""Confidence intervals of evaluation results: pure functions of rewards.

Samples of one task are not independent, so the task is the unit: an interval says where the mean would lie had other
tasks of the same kind been drawn, and sampled again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95
"""The share of intervals that cover what they estimate."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the interval around it; `low` and `high` are None where one task is all there is."""

    mean: float
    low: float | None
    high: float | None


def of_rewards(by_task: Sequence[Sequence[float]]) -> Interval:
    """The mean over tasks of the mean over each task's samples. Raises ValueError without a task, or a sample of one.

    Wilson's interval where every reward is 0 or 1 and each task has one sample, or all rewards are equal (then as if
    each task had one: the least that is known). Else Student's t over the task means, which clustered standard errors
    come to when every task counts the same (Miller, "Adding Error Bars to Evals", arXiv 2411.00640).
    """
    if not by_task or not all(by_task):
        raise ValueError("a mean needs at least one task, and at least one sample of each")
    means = [fmean(samples) for samples in by_task]
    distinct = {reward for samples in by_task for reward in samples}
    if distinct <= {0.0, 1.0} and (len(distinct) == 1 or all(len(samples) == 1 for samples in by_task)):
        return wilson(round(sum(means)), len(means))
    return student(means)


def of_gain(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> Interval | None:
    """The mean of what each task gained, paired by task; None when the two have no task in common.

    Pairing takes the tasks' own difficulty out of the error (Miller, arXiv 2411.00640).
    """
    common = sorted(before.keys() & after.keys())
    return student([fmean(after[task]) - fmean(before[task]) for task in common]) if common else None


def student(values: Sequence[float], level: float = LEVEL) -> Interval:
    """mean ± t(n−1)·s/√n (Student 1908), for independent values."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = t_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def wilson(successes: int, n: int, level: float = LEVEL) -> Interval:
    """Wilson's score interval of a share (JASA 22, 1927): (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Unlike p ± z·√(p(1−p)/n) it holds near 0 and 1 (Brown, Cai, DasGupta, Statistical Science 16, 2001).
    """
    p, z = successes / n, NormalDist().inv_cdf((1 + level) / 2)
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


@lru_cache(maxsize=256)
def t_quantile(p: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom does not exceed with probability p, 1/2 ≤ p < 1."""
    low, high = 0.0, 1.0
    while _t_within(high, freedom) < 2 * p - 1:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_within(middle, freedom) < 2 * p - 1 else (low, middle)
    return high


def _t_within(t: float, freedom: int) -> float:
    """P(|T| ≤ t), the finite series of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine if freedom > 1 else 0.0) if odd else (1.0, 1.0)
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
