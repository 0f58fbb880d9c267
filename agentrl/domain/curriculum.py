"""A curriculum by success: tasks that the policy always solves, or never, are drawn less often.

    a task's turn in pass p ≥ 1 ── coin(run's seed, task, p) < skip? ── no ──► it is drawn
                                        │ yes
                                        ▼
    success rate of its last groups in the target range, or unknown? ── yes ──► it is drawn
                                        │ no
                                        ▼
                            it is skipped in this pass

The coin depends on nothing that happens, so the same recorded rewards always give the same order. The success rate
also decides how many sessions a task's next group has (`AdaptiveGroup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from agentrl.domain.ties import TIE


@dataclass(frozen=True, kw_only=True, slots=True)
class Success:
    """Which episodes succeed."""

    success: float  # the least reward of an episode that succeeds

    def rate(self, rewards: Sequence[float]) -> float | None:
        """The share of these episodes that succeed; None without episodes."""
        return sum(reward >= self.success - TIE for reward in rewards) / len(rewards) if rewards else None


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessRate(Success):
    """How a task's success rate is measured."""

    groups: int  # how many of a task's last groups count


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(Success):
    """Which trained groups a later step trains once more."""

    most_rate: float  # the largest share of successes that is rare
    times: int  # how often a group is trained again
    most: int  # groups of one step

    def is_rare(self, rate: float | None) -> bool:
        """Whether some episodes of a group succeeded, and few."""
        return rate is not None and 0.0 < rate <= self.most_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum(SuccessRate):
    """Which tasks are drawn less often, and how much less."""

    low: float
    high: float  # the target range of success rates, both included
    skip: float  # the probability that a task outside it is skipped in a pass

    def may_skip(self, seed: int, position: int, number_of_pass: int) -> bool:
        """Whether a task outside the target is skipped in this pass: never in the first, pass 0."""
        return number_of_pass > 0 and coin(seed, position, number_of_pass) < self.skip

    def is_outside(self, rate: float | None) -> bool:
        """Whether a task with this success rate is drawn less often. One of unknown success is not."""
        return rate is not None and not self.low <= rate <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveGroup(SuccessRate):
    """How many sessions a group has, by its task's success rate."""

    least: int
    most: int
    first: int  # sessions of a group whose task has no success rate yet
    chance: float  # the wanted chance of a group with both a success and a failure

    def size(self, rate: float | None) -> int:
        """The fewest sessions n from `least` on with `mixed_chance(n, rate)` ≥ `chance`; at most `most`."""
        if rate is None:
            return self.first
        enough = (n for n in range(self.least, self.most) if mixed_chance(n, rate) >= self.chance)
        return next(enough, self.most)


def mixed_chance(n: int, rate: float) -> float:
    """The chance that n independent episodes which each succeed with probability q = `rate` have at least one success
    and at least one failure: 1 − qⁿ − (1 − q)ⁿ.
    """
    return 1.0 - rate**n - (1.0 - rate) ** n


def coin(seed: int, position: int, number_of_pass: int) -> float:
    """A number in [0, 1) for a task, by its position in the run, and a pass."""
    digest = blake2b(f"{seed}/skip/{number_of_pass}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
