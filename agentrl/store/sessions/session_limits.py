"""The part of a run's configuration that admission, liveness and session ends read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from agentrl.configs.proxy_config import MAX_REWARD
from agentrl.configs.rollout_config import CurriculumConfig, RolloutConfig
from agentrl.configs.run_config import RunConfig
from agentrl.domain.curriculum import AdaptiveGroup, Curriculum
from agentrl.domain.staleness import NO_BOUND


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The part of a run's configuration that admission and session ends need."""

    group_size: int
    min_group_size: int
    max_concurrent_groups: int
    max_staleness: int
    lag: int = 0  # versions that an engine may be behind the run: `publish.lag`
    groups_per_step: int
    turn_discount: float
    reward_timeout_s: float
    end_grace_s: float
    session_timeout_s: float
    session_max_s: float
    heartbeat_timeout_s: float
    max_reward: float = MAX_REWARD
    max_subagent_depth: int = 8
    max_subagents_per_session: int = 256
    max_failures_in_a_row: int | None = None
    curriculum: Curriculum | None = None
    greedy_baseline: bool = False  # a group has one more session, a greedy one: `algorithm.baseline: greedy`
    adaptive: AdaptiveGroup | None = None
    traced: bool = False  # spans of its sessions are sent: `metrics.traces`

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The limits of a run."""
        return cls(
            group_size=config.rollout.group_size,
            min_group_size=config.rollout.min_group_size,
            max_concurrent_groups=config.rollout.max_concurrent_groups if config.steps else NO_BOUND,
            max_staleness=config.trainer.max_staleness,
            lag=config.publish.lag,
            groups_per_step=config.trainer.groups_per_step,
            turn_discount=config.rollout.turn_discount,
            reward_timeout_s=config.proxy.reward_timeout_s,
            end_grace_s=config.proxy.end_grace_s,
            session_timeout_s=config.proxy.session_timeout_s,
            session_max_s=config.proxy.session_max_s,
            heartbeat_timeout_s=config.proxy.heartbeat_timeout_s,
            max_reward=config.proxy.max_reward,
            max_subagent_depth=config.proxy.max_subagent_depth,
            max_subagents_per_session=config.proxy.max_subagents_per_session,
            max_failures_in_a_row=config.rollout.max_failures_in_a_row if config.steps else None,
            curriculum=_curriculum(config.rollout.curriculum),
            greedy_baseline=bool(config.steps) and config.trainer.algorithm.needs_greedy,
            adaptive=_adaptive(config.rollout),
            traced=config.metrics.traces is not None,
        )

    @property
    def most_sessions(self) -> int:
        """Sessions that the group of a run's task may have: its samples, and a greedy one where they need it."""
        return (self.group_size if self.adaptive is None else self.adaptive.most) + self.greedy_baseline

    def silence_s(self, owner: str | None) -> float:
        """How long an open session may stay silent: shorter with an owner, which sends heartbeats."""
        return self.session_timeout_s if owner is None else self.heartbeat_timeout_s


def _curriculum(config: CurriculumConfig | None) -> Curriculum | None:
    if config is None:
        return None
    low, high = config.target
    return Curriculum(low=low, high=high, skip=config.skip, success=config.success, groups=config.groups)


def _adaptive(config: RolloutConfig) -> AdaptiveGroup | None:
    sizes = config.adaptive_group
    if sizes is None:
        return None
    return AdaptiveGroup(
        least=sizes.least,
        most=sizes.most,
        first=config.group_size,
        chance=sizes.chance,
        success=sizes.success,
        groups=sizes.groups,
    )
