"""What k of the samples of a task achieve: pass@k, best@k, maj@k and best_of@k, without bias from the choice of the k
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf
from statistics import fmean

from agentrl.domain.majority import MOST_SAMPLES, majority_at
from agentrl.domain.session_stats import OF_REWARDS
from agentrl.domain.ties import TIE

PERFECT = 1.0 - TIE
"""The least reward of a sample that passes."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample that a score chooses or not. `score` None: it has none, and is chosen only where no sample has one."""

    score: float | None
    reward: float  # the true one


def scored(
    rewards: Mapping[str, float], stats: Mapping[str, float], by: str, counted: Sequence[str] | None = None
) -> Scored:
    """A sample with its rewards and measured numbers by name. `by` names rewards, NAME or NAME.KEY, or if there is none
    a number: an agent's, or that of a reward component of weight 0. The true reward is the sum of the rewards that
    `counted` names, or else of all but `by`'s.
    """
    found = (_sum(rewards, by), _sum(stats, by), _sum(stats, f"{OF_REWARDS}/{by}"))
    true = (
        [name for name in rewards if not _belongs(name, by)]
        if counted is None
        else [name for name in rewards if any(_belongs(name, one) for one in counted)]
    )
    return Scored(next((one for one in found if one is not None), None), sum(rewards[name] for name in true))


def _sum(values: Mapping[str, float], component: str) -> float | None:
    """The sum of a component's values; None where it has none."""
    own = [value for name, value in values.items() if _belongs(name, component)]
    return sum(own) if own else None


def _belongs(name: str, component: str) -> bool:
    return name == component or name.startswith(f"{component}.")


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
    choices = comb(n, k)  # divided as integers: a float holds no number of choices of 1,030 samples
    return sum(comb(i, k - 1) / choices * reward for i, reward in enumerate(ordered))


def best_of_at(k: int, samples: Sequence[Scored]) -> float:
    """best_of@k: the expected true reward of the sample with the highest score among k, over all choices of k of the n
    samples; chance decides between equal scores.

    With the scores in ascending order, b_s samples below score s, m_s samples at it, and r_s the mean true reward of
    those, it is Σ_s [C(b_s + m_s, k) − C(b_s, k)] / C(n, k) · r_s: the bracket counts the choices whose highest score
    is s. Without ties this is Σ_i C(i−1, k−1) / C(n, k) · r_i (Nakano and others, 2021, arXiv:2112.09332, appendix I).
    """
    n = len(samples)
    assert 1 <= k <= n
    by_score: dict[float, list[float]] = {}
    for one in samples:
        by_score.setdefault(-inf if one.score is None else one.score, []).append(one.reward)
    below, total, choices = 0, 0.0, comb(n, k)
    for score in sorted(by_score):
        upto = below + len(by_score[score])
        total += (comb(upto, k) - comb(below, k)) / choices * fmean(by_score[score])
        below = upto
    return total


def sizes(samples: int) -> list[int]:
    """The k to report for a number of samples: powers of two, and the number itself."""
    return sorted({*(2**i for i in range(samples.bit_length()) if 2**i <= samples), samples} if samples else ())


def of_tasks(
    tasks: Sequence[Sequence[float]],
    answers: Sequence[Sequence[str | None]] = (),
    choices: Sequence[Sequence[Scored]] = (),
) -> dict[str, dict[str, float]]:
    """`pass`, `best`, `maj` and `best_of` by k, and `avg` of all samples, as means over the tasks; k up to the fewest
    samples of a task. `tasks` are the rewards of their samples, `answers` what the samples answered, `choices` how they
    are scored.

    Empty unless every task has at least two samples. `maj` is left out where no sample has an answer, or a task has
    more than MOST_SAMPLES samples; `best_of` where no sample has a score.
    """
    fewest = min(map(len, tasks), default=0)
    if fewest < 2:
        return {}
    voted = any(answer is not None for task in answers for answer in task) and max(map(len, tasks)) <= MOST_SAMPLES
    majorities = {
        str(k): fmean(majority_at(k, said, task) for said, task in zip(answers, tasks, strict=True))
        for k in sizes(fewest if voted else 0)
    }
    has_scores = any(one.score is not None for task in choices for one in task)
    chosen = {str(k): fmean(best_of_at(k, task) for task in choices) for k in sizes(fewest if has_scores else 0)}
    return {
        "pass": {str(k): fmean(pass_at(k, task) for task in tasks) for k in sizes(fewest)},
        "best": {str(k): fmean(best_at(k, task) for task in tasks) for k in sizes(fewest)},
        **({"maj": majorities} if majorities else {}),
        **({"best_of": chosen} if chosen else {}),
        "avg": {str(fewest): fmean(fmean(task) for task in tasks)},
    }
