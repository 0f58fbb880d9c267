"""One score from the scores of several judgements of one answer, and how far they agree. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, median, median_low, multimode, pstdev

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "majority": lambda scores: median_low(multimode(scores)),
}
"""Name → the score of at least one judgement. `majority`: the most frequent one; of equally frequent ones, the lower
median.
"""


def pairwise_agreement(scores: Sequence[float]) -> float:
    """The share of pairs of judgements with equal scores, Σ_s n_s (n_s − 1) / (n (n − 1)); 1 for one judgement.

    The observed agreement P_i of one subject in Fleiss, "Measuring nominal scale agreement among many raters",
    Psychological Bulletin 76 (1971), eq. 2.
    """
    n = len(scores)
    return 1.0 if n < 2 else sum(k * (k - 1) for k in Counter(scores).values()) / (n * (n - 1))


def disagreement(scores: Sequence[float]) -> dict[str, float]:
    """`agreement` (`pairwise_agreement`) and `std` (the population deviation, in the unit of the scores)."""
    return {"agreement": pairwise_agreement(scores), "std": pstdev(scores)}
