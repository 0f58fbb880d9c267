"""A curriculum by success: tasks that the policy always solves, or never, are drawn less often.

    a task's turn in pass p ≥ 1 ── coin(run's seed, task, p) < skip? ── no ──► it is drawn
                                        │ yes
                                        ▼
    success rate of its last groups in the target range, or unknown? ── yes ──► it is drawn
                                        │ no
                                        ▼
                            it is skipped in this pass

The coin depends on nothing that happens, so the same recorded rewards always give the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from agentrl.domain.ties import TIE


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum:
    """Which tasks are drawn less often, and how much less."""

    low: float
    high: float  # the target range of success rates, both included
    skip: float  # the probability that a task outside it is skipped in a pass
    success: float  # the least reward of an episode that succeeds
    groups: int  # how many of a task's last groups count

    def may_skip(self, seed: int, position: int, number_of_pass: int) -> bool:
        """Whether a task outside the target is skipped in this pass: never in the first, pass 0."""
        return number_of_pass > 0 and coin(seed, position, number_of_pass) < self.skip

    def rate(self, rewards: Sequence[float]) -> float | None:
        """The share of these episodes that succeed; None without episodes."""
        return sum(reward >= self.success - TIE for reward in rewards) / len(rewards) if rewards else None

    def is_outside(self, rate: float | None) -> bool:
        """Whether a task with this success rate is drawn less often. One of unknown success is not."""
        return rate is not None and not self.low <= rate <= self.high


def coin(seed: int, position: int, number_of_pass: int) -> float:
    """A number in [0, 1) for a task, by its position in the run, and a pass."""
    digest = blake2b(f"{seed}/skip/{number_of_pass}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64
