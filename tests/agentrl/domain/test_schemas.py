"""A trajectory's digest is over all that a step computes with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.domain.schemas import TrajectoryTokens


def trajectory() -> TrajectoryTokens:
    """Five tokens, the last three of two calls."""
    return TrajectoryTokens(
        trajectory_id="t",
        session_id="s",
        episode_id="e",
        group_id="g",
        input_ids=np.arange(5, dtype=np.int32),
        loss_mask=np.array([False, False, True, True, False]),
        logprobs=np.array([0, 0, -1, -2, -3], np.float32),
        versions=np.array([-1, -1, 0, 0, 1], np.int32),
        turn_ids=np.array([-1, -1, 0, 0, 1], np.int32),
        temperatures=np.ones(5, np.float32),
        turn_returns=np.array([1.0, 0.5]),
        episode_return=1.0,
        named_returns={"right": 0.75, "short": 0.25},
        calls=("a", "b"),
        prompts=("0", "1"),
        kv_mixed_turns=frozenset({1}),
        routed=RoutedExperts(np.zeros((5, 1, 2), np.uint8), np.zeros(5, np.int8)),
        truncated=True,
        greedy_return=0.5,
    )


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case np.ndarray():
            return ~value if value.dtype == np.bool_ else value + value.dtype.type(1)
        case RoutedExperts():
            return replace(value, ids=value.ids + np.uint8(1))
        case dict():
            return value | {"short": 0.5}
        case tuple():
            return (*value[:-1], "c")
        case frozenset():
            return value | {0}
    return f"{value}'" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [one.name for one in fields(TrajectoryTokens)])
def test_every_field_changes_the_digest_of_a_trajectory(name: str) -> None:
    one = trajectory()
    assert trajectory().digest() == one.digest()
    assert replace(one, **{name: other(getattr(one, name))}).digest() != one.digest()
