"""Group-relative advantages, by hand-computed tables."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support import random_trajectory

from agentrl.schemas import TrajectoryTokens
from agentrl.trainer.advantages import token_advantages, turn_advantages


def trajectory(group: str, session: str, value: float, turns: list[float] | None = None) -> TrajectoryTokens:
    t = random_trajectory(np.random.default_rng(0), [3, 4], group=group, name=session, turns=len(turns or [value]))
    return dataclasses.replace(
        t,
        session_id=session,
        episode_id=session,
        episode_return=value,
        turn_returns=np.array(turns or [value], np.float32),
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [-1.161895, -0.387298, 0.387298, 1.161895]),  # std with n − 1: 1.290994
        ("dr_grpo", [-1.5, -0.5, 0.5, 1.5]),
        ("rloo", [-2.0, -2 / 3, 2 / 3, 2.0]),  # 0 − 6/3, 1 − 5/3, …
    ],
)
def test_estimators(estimator: str, expected: list[float]) -> None:
    group = [trajectory("g", f"s{i}", float(i)) for i in range(4)]
    assert [a.item() for a in turn_advantages(group, estimator)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_and_a_tied_group_have_no_advantage(estimator: str) -> None:
    alone = [trajectory("g1", "s0", 1.0)]
    tied = [trajectory("g2", f"s{i}", 0.7) for i in range(1, 4)]
    assert all(not a.any() for a in turn_advantages(alone + tied, estimator))


def test_a_session_with_many_paths_counts_once_in_the_baseline() -> None:
    group = [trajectory("g", "s0", 1.0)] * 5 + [trajectory("g", "s1", 0.0)]
    assert [a.item() for a in turn_advantages(group, "dr_grpo")] == [0.5] * 5 + [-0.5]


def test_groups_do_not_mix() -> None:
    groups = [
        trajectory("g1", "a", 0.0),
        trajectory("g1", "b", 1.0),
        trajectory("g2", "c", 10.0),
        trajectory("g2", "d", 12.0),
    ]
    assert [a.item() for a in turn_advantages(groups, "dr_grpo")] == [-0.5, 0.5, -1.0, 1.0]


def test_each_turn_is_measured_against_the_session_baseline_and_broadcast_on_its_tokens() -> None:
    group = [trajectory("g", "s0", 0.5, [0.5, 1.0]), trajectory("g", "s1", 0.0, [0.0, 0.0])]
    turns = turn_advantages(group, "dr_grpo")
    assert turns[0].tolist() == [0.25, 0.75]
    tokens = token_advantages(group[0], turns[0])
    assert tokens.tolist() == [0, 0, *[0.25] * 5, 0, 0, 0, *[0.75] * 5]
