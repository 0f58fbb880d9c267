"""Confidence intervals of evaluation results: pure functions of rewards.

Samples of one task are not independent, so the task is the unit: an interval is for the mean over all tasks of the same
kind.

If all rewards lie in [0, 1], the interval lies in [0, 1] too. Student's quantile is computed here, because scipy would
be a dependency for this function alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95
"""Confidence level: the share of intervals that contain the true mean."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the interval around it; `low` and `high` are None for a single task."""

    mean: float
    low: float | None
    high: float | None


def of_rewards(by_task: Sequence[Sequence[float]]) -> Interval:
    """The mean over tasks of the mean over each task's samples. Raises ValueError without tasks or for a task without
    samples.

    The interval is Wilson's if every reward is 0 or 1 and each task has one sample. It is `bounded` over the task means
    if every reward lies in [0, 1]. Otherwise it is Student's t over the task means, which equals clustered standard
    errors when every task has the same weight (Miller, "Adding Error Bars to Evals", arXiv 2411.00640).
    """
    if not by_task or not all(by_task):
        raise ValueError("a mean needs at least one task, and at least one sample of each")
    means = [fmean(samples) for samples in by_task]
    if not _in_unit(by_task):
        return student(means)
    if all(len(samples) == 1 and samples[0] in (0.0, 1.0) for samples in by_task):
        return wilson(round(sum(means)), len(means))
    return bounded(means)


def of_gain(before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]) -> Interval | None:
    """The mean gain over tasks, paired by task; None when the two have no task in common.

    Pairing removes the difficulty of the tasks from the error (Miller, arXiv 2411.00640). If every reward lies in
    [0, 1], gains lie in [-1, 1], and the interval is that of (1 + gain) / 2, scaled back to [-1, 1].
    """
    common = sorted(before.keys() & after.keys())
    if not common:
        return None
    gains = [fmean(after[task]) - fmean(before[task]) for task in common]
    if not (_in_unit(before.values()) and _in_unit(after.values())):
        return student(gains)
    half = bounded([(1 + gain) / 2 for gain in gains])
    ends = (None if end is None else 2 * end - 1 for end in (half.low, half.high))
    return Interval(fmean(gains), *ends)


def _in_unit(by_task: Iterable[Sequence[float]]) -> bool:
    return all(0.0 <= reward <= 1.0 for samples in by_task for reward in samples)


def bounded(values: Sequence[float]) -> Interval:
    """Wilson's score interval of the mean of independent values in [0, 1], at their effective sample size.

    n* = p(1−p)/(s²/n) is the number of independent 0/1 values whose mean would vary as this one does, and t(n−1) takes
    the place of z (Korn and Graubard, Survey Methodology 24, 1998; Franco, Little, Louis and Slud, Journal of Survey
    Statistics and Methodology 7, 2019). Near 1/2 this is Student's interval; near 0 and 1 it is shifted inwards. For
    values that are all 0, or all 1, n* is unknown, and Wilson's interval of n such values is used.
    """
    p, n = fmean(values), len(values)
    if set(values) <= {0.0} or set(values) <= {1.0}:
        return wilson(round(p * n), n)
    if n < 2:
        return Interval(p, None, None)
    variance = stdev(values) ** 2 / n
    if variance == 0.0:
        return Interval(p, p, p)
    return score(p, p * (1 - p) / variance, t_quantile((1 + LEVEL) / 2, n - 1))


def student(values: Sequence[float]) -> Interval:
    """mean ± t(n−1)·s/√n (Student 1908), for independent values."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    half = t_quantile((1 + LEVEL) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def wilson(successes: int, n: int) -> Interval:
    """Wilson's score interval of a share.

    Unlike p ± z·√(p(1−p)/n) it is accurate near 0 and 1 (Brown, Cai, DasGupta, Statistical Science 16, 2001).
    """
    return score(successes / n, n, NormalDist().inv_cdf((1 + LEVEL) / 2))


def score(p: float, n: float, z: float) -> Interval:
    """(p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n) (Wilson, JASA 22, 1927)."""
    middle = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return Interval(p, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale))


@lru_cache(maxsize=256)
def t_quantile(p: float, freedom: int) -> float:
    """The quantile at p, 1/2 ≤ p < 1, of Student's t distribution with `freedom` degrees of freedom."""
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
