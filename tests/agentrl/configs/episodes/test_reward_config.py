"""The section `reward`."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.configs.config_files import apply_override, parse_config
from agentrl.domain.batches.reward_scaling import Scale, scales_of
from agentrl.errors import ConfigError

BASE: dict[str, Any] = {"name": "r", "model": "tiny", "tasks": "t.jsonl"}


def test_a_string_is_the_function() -> None:
    config = parse_config(BASE | {"reward": "a:b"})
    assert config.reward is not None
    assert (config.reward.function, config.runs_agents) == ("a:b", True)
    assert list(config.reward.functions) == ["reward"]
    assert parse_config(config.model_dump(mode="json")) == config
    assert not parse_config(BASE).runs_agents


def test_what_is_trained_of_a_component_is_its_scale() -> None:
    components = {
        "style": {"function": "a:b", "normalize": "running_per_source", "clip": [-3, 3], "weight": 0.5},
        "plain": {"function": "a:b"},
        "short": {"function": "a:c", "clip": [0, 1]},
    }
    config = parse_config(BASE | {"reward": {"components": components}})
    assert config.reward is not None
    assert scales_of(config.reward) == {
        "style": Scale(normalize="running_per_source", clip=(-3.0, 3.0), weight=0.5),
        "short": Scale(clip=(0.0, 1.0)),
    }
    assert parse_config(config.model_dump(mode="json")) == config  # as the run's folder keeps it
    single = parse_config(BASE | {"reward": {"function": "a:b", "normalize": "running"}}).reward
    assert scales_of(single) == {"reward": Scale(normalize="running")}
    assert scales_of(None) == {}


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
        ({"components": {"x": {"function": "a:c"}}, "normalize": "running"}, "`normalize` belongs to `function`"),
        ({"function": "a:b", "normalize": "runing"}, "no 'runing'; did you mean 'running'"),
        ({"function": "a:b", "clip": [1, 1]}, r"\[low, high\] with low below high, got \[1, 1\]"),
        ({"function": "a:b", "clip": [0]}, "clip"),
        ({"function": "a:b", "per": "call", "batched": True}, "per: call judges every call alone"),
        ({"components": {"x": {"function": "a:c", "weight": 0, "clip": [0, 1]}}}, "components.x: weight 0 trains noth"),
        ({"components": {f"x{i}": {"function": "a:c", "weight": 0} for i in range(17)}}, "17 components have weight 0"),
        ({"function": "a:b", "timeout": 3}, "unknown config key 'reward.timeout'; did you mean 'timeout_s'"),
        ({"components": {"x": {"function": "a:c", "wieght": 1}}}, "did you mean 'weight'"),
        (7, "reward"),
    ],
)
def test_an_invalid_section_is_refused(reward: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE | {"reward": reward})
