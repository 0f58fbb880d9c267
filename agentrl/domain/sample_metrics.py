"""What k of the samples of a task achieve: pass@k, best@k and maj@k, without bias from the choice of the k samples."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import fmean

from agentrl.domain.majority import MOST_SAMPLES, majority_at
from agentrl.domain.ties import TIE

PERFECT = 1.0 - TIE
"""The least reward of a sample that passes."""


def pass_at(k: int, rewards: Sequence[float]) -> float:
    """The chance that one of k samples passes: 1 − C(n−c, k) / C(n, k), for c of n samples that pass (Chen and others,
    2021).
    """
    n, passed = len(rewards), sum(reward >= PERFECT for reward in rewards)
    assert 1 <= k <= n
    return 1.0 - comb(n - passed, k) / comb(n, k)


def best_at(k: int, rewards: Sequence[float]) -> float:
    """The mean of the best reward of k samples, over all choices of k of the n samples."""
    n = len(rewards)
    assert 1 <= k <= n
    ordered = sorted(rewards)  # the i-th smallest is the best of C(i, k−1) choices
    return sum(comb(i, k - 1) * reward for i, reward in enumerate(ordered)) / comb(n, k)


def sizes(samples: int) -> list[int]:
    """The k to report for a number of samples: powers of two, and the number itself."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples} if samples else ())


def of_tasks(
    tasks: Sequence[Sequence[float]], answers: Sequence[Sequence[str | None]] = ()
) -> dict[str, dict[str, float]]:
    """`pass`, `best` and `maj` by k, and `avg` of all samples, as means over the tasks; k up to the fewest samples of a
    task. `tasks` are the rewards of their samples, `answers` what the samples answered.

    Empty unless every task has at least two samples. `maj` is left out where no sample has an answer, or a task has
    more than MOST_SAMPLES samples.
    """
    fewest = min(map(len, tasks), default=0)
    if fewest < 2:
        return {}
    voted = any(answer is not None for task in answers for answer in task) and max(map(len, tasks)) <= MOST_SAMPLES
    majorities = {
        str(k): fmean(majority_at(k, said, task) for said, task in zip(answers, tasks, strict=True))
        for k in sizes(fewest if voted else 0)
    }
    return {
        "pass": {str(k): fmean(pass_at(k, task) for task in tasks) for k in sizes(fewest)},
        "best": {str(k): fmean(best_at(k, task) for task in tasks) for k in sizes(fewest)},
        **({"maj": majorities} if majorities else {}),
        "avg": {str(fewest): fmean(fmean(task) for task in tasks)},
    }
