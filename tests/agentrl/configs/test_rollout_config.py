"""The curriculum and the sizes of groups of a run's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.domain.curriculum import AdaptiveGroup, Curriculum
from agentrl.errors import ConfigError
from agentrl.store.sessions.session_limits import Limits


def limits(rollout: dict[str, Any]) -> Limits:
    return Limits.of(parse_config({"name": "r", "model": "tiny", "rollout": rollout}))


def test_a_curriculum_is_opt_in() -> None:
    assert limits({}).curriculum is None
    default = Curriculum(low=0.05, high=0.95, skip=0.75, success=1.0, groups=2)
    assert limits({"curriculum": {}}).curriculum == default
    given = {"target": [0, 0.5], "skip": 0.9, "success": 0.8, "groups": 1}
    assert limits({"curriculum": given}).curriculum == Curriculum(low=0, high=0.5, skip=0.9, success=0.8, groups=1)


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        ({"target": [0.9, 0.1]}, "target: 0.9 is larger than 0.1"),
        ({"target": [0, 1.5]}, "target.*less than or equal to 1"),
        ({"target": [0.5]}, "target"),
        ({"skip": 1}, "skip.*less than 1"),
        ({"skip": 0}, "skip.*greater than 0"),
        ({"groups": 0}, "groups.*greater than or equal to 1"),
        ({"success": float("inf")}, "success.*finite"),
        ({"skips": 0.5}, "skips.*did you mean.*skip"),
    ],
)
def test_an_invalid_curriculum_is_refused_by_name(curriculum: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits({"curriculum": curriculum})


def test_adaptive_sizes_are_opt_in() -> None:
    assert (limits({}).adaptive, limits({}).most_sessions) == (None, 8)
    found = limits({"adaptive_group": {"most": 12, "chance": 0.8}})
    assert found.adaptive == AdaptiveGroup(least=4, most=12, first=8, chance=0.8, success=1.0, groups=2)
    assert found.most_sessions == 12


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"adaptive_group": {"least": 9, "most": 8}}, "least: 9 is larger than most: 8"),
        ({"adaptive_group": {"least": 1}}, "least.*greater than or equal to 2"),
        ({"adaptive_group": {"most": 2000}}, "most.*less than or equal to 1024"),
        ({"adaptive_group": {"chance": 1}}, "chance.*less than 1"),
        ({"adaptive_group": {"chanse": 0.5}}, "did you mean 'chance'"),
        ({"adaptive_group": {}, "group_size": 2}, "group_size 2 is not within adaptive_group, which has 4 to 16"),
        ({"adaptive_group": {}, "min_group_size": 5}, "min_group_size 5 is larger than adaptive_group.least 4"),
    ],
)
def test_invalid_adaptive_sizes_are_refused_by_name(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits(rollout)


def test_the_smallest_group_has_as_many_as_the_objective_counts() -> None:
    trainer = {"algorithm": {"preset": "pkpo", "best_of": 8}}
    base = {"name": "r", "model": "tiny", "trainer": trainer}
    assert parse_config(base | {"rollout": {"group_size": 8}}).trainer.algorithm.best_of == 8
    with pytest.raises(ConfigError, match=r"best_of: 8 is more than rollout.adaptive_group.least: 4"):
        parse_config(base | {"rollout": {"group_size": 8, "adaptive_group": {}}})


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"rate": 0}, "rate.*greater than 0"),
        ({"rate": 1}, "rate.*less than 1"),
        ({"times": 0}, "times.*greater than or equal to 1"),
        ({"time": 1}, "did you mean 'times'"),
    ],
)
def test_an_invalid_replay_is_refused_by_name(replay: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits({"replay": replay})


def test_replays_need_a_staleness_bound_above_0() -> None:
    base = {"name": "r", "model": "tiny", "rollout": {"replay": {}}}
    assert parse_config(base).rollout.replay is not None
    with pytest.raises(ConfigError, match=r"rollout.replay: .* set trainer.max_staleness to at least 1"):
        parse_config(base | {"trainer": {"max_staleness": 0}})
