"""The curriculum of a run's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import parse_config
from agentrl.domain.curriculum import Curriculum
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
