"""The section `reward`."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import apply_override, parse_config
from agentrl.errors import ConfigError

BASE: dict[str, Any] = {"name": "r", "model": "tiny", "tasks": "t.jsonl"}


def test_a_string_is_the_function() -> None:
    config = parse_config(BASE | {"reward": "a:b"})
    assert config.reward is not None
    assert (config.reward.function, config.runs_agents) == ("a:b", True)
    assert list(config.reward.functions) == ["reward"]
    assert parse_config(config.model_dump(mode="json")) == config
    assert not parse_config(BASE).runs_agents


def test_an_override_changes_the_section_of_a_string() -> None:
    data = BASE | {"reward": "a:b"}
    apply_override(data, "reward.timeout_s=5")
    assert data["reward"] == {"function": "a:b", "timeout_s": 5}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({}, "give either `function` or `components`"),
        ({"function": "a:b", "components": {"x": {"function": "a:c"}}}, "give either"),
        ({"components": {"x": {"function": "a:c"}}, "args": {"n": 1}}, "belongs to `function`"),
        ({"components": {"x y": {"function": "a:c"}}}, "pattern"),
        ({"function": "a:b", "timeout": 3}, "unknown config key 'reward.timeout'; did you mean 'timeout_s'"),
        ({"components": {"x": {"function": "a:c", "wieght": 1}}}, "did you mean 'weight'"),
        (7, "reward"),
    ],
)
def test_an_invalid_section_is_refused(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE | {"reward": reward})
