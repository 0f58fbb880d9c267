"""maj@k: the expected reward of the answer that most of k samples give.

Choose k of the n samples of a task, each choice alike. The answer with the most votes wins; chance decides between
answers with equally many. Its reward is the mean reward of its votes. For answers a with n_a samples and their mean
reward r_a,

    maj@k = 1 / C(n, k) · Σ_j Σ_t 1/t · Σ_{t answers with j votes each} (Σ r_a over them) · Π C(n_a, j) · rest

where `rest` counts the choices of the other k − t·j samples in which every other answer has fewer than j votes. The
sums are those of the polynomials Π_a (Σ_{i<j} C(n_a, i) x^i + y C(n_a, j) x^j), at x^k y^t; r_a stands for the samples
of a because every choice of j of them is alike. So this is the mean over all C(n, k) choices. The vote is that of Wang
and others, 2022 (self-consistency, arXiv:2203.11171); maj1@k is reported by Lewkowycz and others, 2022
(arXiv:2206.14858).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from statistics import fmean

import numpy as np

MOST_SAMPLES = 256
"""Samples of a task: so many take a quarter of a second, and C(n, k) is a float for each k up to this n."""
Answers = tuple[tuple[int, float], ...]
"""For each answer, how many samples give it, and their mean reward; ascending."""


def majority_at(k: int, answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """maj@k of a task: `answers` and `rewards` of its samples. A sample without an answer is an answer of its own."""
    assert len(answers) == len(rewards)
    assert 1 <= k <= len(rewards) <= MOST_SAMPLES
    votes: dict[str | int, list[float]] = {}
    for number, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
        votes.setdefault(number if answer is None else answer, []).append(reward)
    return _expected(k, tuple(sorted((len(of_answer), fmean(of_answer)) for of_answer in votes.values())))


@lru_cache(maxsize=16_384)
def _expected(k: int, answers: Answers) -> float:
    most = min(k, answers[-1][0])
    total = sum(_of_choices(k, votes, answers) for votes in range(1, most + 1))
    return total / comb(sum(count for count, _ in answers), k)


def _of_choices(k: int, votes: int, answers: Answers) -> float:
    """The sum of the majority's reward over the choices of k samples in which it has `votes` votes."""
    ways = np.zeros((k // votes + 1, k + 1))  # [answers with `votes` votes, samples chosen] → number of choices
    worth = np.zeros_like(ways)  # the same, each times the sum of the rewards of these answers
    ways[0, 0] = 1.0
    for count, reward in answers:
        more_ways, more_worth = np.zeros_like(ways), np.zeros_like(worth)
        for chosen in range(min(count, votes - 1) + 1):
            times = float(comb(count, chosen))
            more_ways[:, chosen:] += times * ways[:, : k + 1 - chosen]
            more_worth[:, chosen:] += times * worth[:, : k + 1 - chosen]
        if count >= votes:
            times, before = float(comb(count, votes)), ways[:-1, : k + 1 - votes]
            more_ways[1:, votes:] += times * before
            more_worth[1:, votes:] += times * (worth[:-1, : k + 1 - votes] + reward * before)
        ways, worth = more_ways, more_worth
    return sum(float(worth[tied, k]) / tied for tied in range(1, k // votes + 1))
