"""Advantages: hand-computed tables, and loops over random groups in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from part_values import values
from support import random_trajectory

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.algorithms.advantages import (
    overlong_penalties,
    overlong_penalty,
    penalized_advantages,
    token_advantages,
    turn_advantages,
)

OF_RETURNS = [name for name in PRESETS if Algorithm(preset=name).estimator == "returns"]
LARGE = 2.0**25
GROUP_RELATIVE = [name for name in OF_RETURNS if Algorithm(preset=name).is_group_relative]


def trajectory(
    group: str, session: str, value: float, turns: list[float] | None = None, output: int = 5
) -> TrajectoryTokens:
    t = random_trajectory(
        np.random.default_rng(0), [3, 4], group=group, name=session, turns=len(turns or [value]), output=output
    )
    return dataclasses.replace(
        t,
        session_id=session,
        episode_id=session,
        episode_return=value,
        turn_returns=np.array(turns or [value], np.float64),
    )


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("grpo", [-1.161895, -0.387298, 0.387298, 1.161895]),  # std with n − 1: 1.290994
        ("dr_grpo", [-1.5, -0.5, 0.5, 1.5]),
        ("rloo", [-2.0, -2 / 3, 2 / 3, 2.0]),  # 0 − 6/3, 1 − 5/3, …
        ("reinforce++", [-1.341641, -0.447214, 0.447214, 1.341641]),  # deviation with n: 1.118034
        ("gpg", [-1.5, -0.5, 0.5, 1.5]),
        ("asymre", [-1.4, -0.4, 0.6, 1.6]),
        ("remax", [-0.25, 0.75, 1.75, 2.75]),  # the greedy episode's return is 0.25
        ("w_reinforce", [-0.5, 0.05, 0.15, 0.25]),
        ("pkpo", [0.0, 0.0, 0.0, 4.0]),  # k is 4: only the best one adds to the maximum
    ],
)
def test_estimators_equal_the_values_computed_by_hand(preset: str, expected: list[float]) -> None:
    group = [trajectory("g", f"s{i}", float(i)) for i in range(4)]
    assert [a.item() for a in turn_advantages(group, Algorithm(preset=preset))] == pytest.approx(expected, rel=1e-5)


# -- against loops -------------------------------------------------------------------------------------------------


def random_groups(seed: int) -> list[TrajectoryTokens]:
    """Groups of one to five episodes, one tied; episodes of several paths and turns, some without loss tokens."""
    rng = np.random.default_rng(seed)
    found: list[TrajectoryTokens] = []
    for g, size in enumerate([1, 2, 3, 5, 3]):
        for e in range(size):
            value = 0.5 if g == 4 else float(rng.normal())
            for path in range(int(rng.integers(1, 3))):
                named = {"right": value * e, "short": value * (1 - e)} if g != 2 else {"right": value}
                t = trajectory(
                    f"g{g}",
                    f"e{g}.{e}",
                    value,
                    turns=rng.normal(0, 1, rng.integers(1, 4)).tolist(),
                    output=int(rng.integers(1, 6)),
                )
                mask = t.loss_mask & (rng.random(len(t.loss_mask)) < 0.8) & (path == 0 or e % 2 == 0)
                turns = len(t.turn_returns)
                states = [f"{g}.{k if k == 0 else rng.integers(2)}" for k in range(turns)]
                calls = tuple(f"e{g}.{e}.{path if k else 0}.{k}" for k in range(turns))
                if path:  # the first call is that of the first path
                    t.turn_returns[0] = found[-1].turn_returns[0]
                changes = {
                    "calls": calls,
                    "prompts": tuple(states),
                    "trajectory_id": f"{t.trajectory_id}.{path}",
                    "loss_mask": mask,
                    "named_returns": named,
                    "greedy_return": 0.3 * g,
                }
                found.append(dataclasses.replace(t, **changes))
    return found


def by_hand(trajectories: list[TrajectoryTokens], a: Algorithm) -> list[list[float]]:
    longest: dict[str, int] = {}
    for t in trajectories:
        longest[t.episode_id] = max(longest.get(t.episode_id, 0), sum(1 for turn in t.turn_ids if turn >= 0))
    penalty = dict.fromkeys(longest, 0.0)
    if a.overlong_tokens:
        for episode, n in longest.items():
            soft = a.overlong_tokens - a.overlong_buffer
            if n > a.overlong_tokens:
                penalty[episode] = -a.overlong_penalty
            elif n > soft:
                penalty[episode] = a.overlong_penalty * (soft - n) / a.overlong_buffer
    groups: dict[str, dict[str, float]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, {})[t.episode_id] = t.episode_return + penalty[t.episode_id]
    everything = [value for episodes in groups.values() for value in episodes.values()]
    spread = [len(episodes) for episodes in groups.values() if len(set(episodes.values())) > 1]
    alpha = len(everything) / sum(spread)
    sizes: dict[str, int] = {}
    for t in trajectories:
        sizes[t.episode_id] = sizes.get(t.episode_id, 0) + int(t.loss_mask.sum())
    out = []
    for t in trajectories:
        group = groups[t.group_id]
        values = list(group.values())
        others = [v for episode, v in group.items() if episode != t.episode_id]
        own = list(t.turn_returns) if a.credit == "turn" else [t.episode_return] * len(t.turn_returns)
        tied = len(set(values)) == 1
        advantages = []
        for r in own:
            value = float(r) + penalty[t.episode_id]
            if a.normalization == "per_reward":
                advantages.append(
                    alpha * per_reward(t, trajectories, penalty, a)
                    if a.rescale_tied
                    else per_reward(t, trajectories, penalty, a)
                )
                continue
            if a.baseline not in ("none", "greedy") and tied:
                advantages.append(0.0)
                continue
            if a.baseline == "group_mean":
                value -= statistics.mean(values)
            elif a.baseline == "leave_one_out":
                value -= statistics.mean(others)
            elif a.baseline == "length_weighted":
                weights = [sizes[episode] for episode in group]
                value -= statistics.fmean(values, weights) if any(weights) else statistics.mean(values)
            elif a.baseline == "greedy":
                assert t.greedy_return is not None
                value -= t.greedy_return
            elif a.baseline == "max_at_k":
                value = best_of(group[t.episode_id], others, a.best_of)
            else:
                assert a.baseline == "none", f"no formula for baseline {a.baseline}"
            value -= a.baseline_shift
            if a.normalization == "group_std":
                value = value / (statistics.stdev(values) + 1e-6) if not tied else 0.0
            elif a.normalization == "batch_std":
                value /= statistics.stdev(everything) + 1e-6
            else:
                assert a.normalization in ("whiten", "none"), f"no formula for normalization {a.normalization}"
            advantages.append(value * alpha if a.rescale_tied else value)
        out.append(advantages)
    for t, advantages in zip(trajectories, out, strict=True):
        for k, (call, state) in enumerate(zip(t.calls, t.prompts, strict=True) if a.step_weight else []):
            peers = {
                c: float(o.turn_returns[i])
                for o in trajectories
                for i, c in enumerate(o.calls)
                if o.group_id == t.group_id and o.prompts[i] == state
            }
            if max(peers.values()) > min(peers.values()):
                deviation = statistics.stdev(peers.values()) + 1e-6
                advantages[k] += a.step_weight * (peers[call] - statistics.mean(peers.values())) / deviation
    if a.normalization in ("whiten", "per_reward"):
        counts = [a.baseline in ("none", "greedy") or len(groups[t.group_id]) > 1 for t in trajectories]
        tokens = [
            advantages[turn]
            for t, advantages, c in zip(trajectories, out, counts, strict=True)
            for turn, trained in zip(t.turn_ids, t.loss_mask, strict=True)
            if trained and c
        ]
        mean, deviation = statistics.mean(tokens), statistics.pstdev(tokens)
        out = [
            [(x - mean) / (deviation + 1e-6) if c else 0.0 for x in advantages]
            for advantages, c in zip(out, counts, strict=True)
        ]
    return [[x * (a.positive_weight if x > 0 else a.negative_weight) for x in advantages] for advantages in out]


def per_reward(t: TrajectoryTokens, batch: list[TrajectoryTokens], penalty: dict[str, float], a: Algorithm) -> float:
    """GDPO before the batch is whitened: z-scores of each name, summed."""
    group = {
        o.episode_id: {**o.named_returns, "overlong": penalty[o.episode_id]} for o in batch if o.group_id == t.group_id
    }
    total = 0.0
    for name in {name for rewards in group.values() for name in rewards}:
        values = [rewards.get(name, 0.0) for rewards in group.values()]
        if max(values) > min(values):
            score = (group[t.episode_id].get(name, 0.0) - statistics.mean(values)) / (statistics.stdev(values) + 1e-6)
            total += a.reward_weights.get(name, 1.0) * score
    return total


def best_of(own: float, others: list[float], k: int) -> float:
    """What an episode adds to the maximum of k, over every choice of the others."""
    choices = list(itertools.combinations(others, min(k - 1, len(others))))
    return (len(choices[0]) + 1) * statistics.mean(max(own, *chosen) - max(chosen) for chosen in choices)


CHOICES: list[dict[str, Any]] = [
    *({"preset": name} for name in OF_RETURNS),
    *(
        {"baseline": b, "normalization": n, "credit": c}
        for b in values("baseline")
        for n in values("normalization")
        for c in values("credit")
        if b not in ("critic", "max_at_k")
        and (b, n) != ("none", "group_std")  # a group of one has no deviation
        and n != "per_reward"
    ),
    {"preset": "gdpo", "reward_weights": {"right": 0.5, "overlong": 0.2}, "overlong_tokens": 9, "overlong_buffer": 4},
    *(
        {"baseline": "max_at_k", "normalization": n, "credit": "trajectory", "best_of": k}
        for n, k in [("none", 2), ("none", 3), ("none", 7), ("whiten", 3)]
    ),
    {"step_weight": 0.7, "normalization": "none"},
    {"step_weight": 0.7, "normalization": "whiten", "credit": "trajectory"},
    {"baseline_shift": -0.3, "baseline": "leave_one_out"},
    {"rescale_tied": True},
    {"rescale_tied": True, "normalization": "none", "positive_weight": 0.0},
    {"negative_weight": 0.0, "positive_weight": 2.5},
    {"normalization": "whiten", "negative_weight": 0.5},
    {"overlong_tokens": 9, "overlong_buffer": 4, "overlong_penalty": 0.7},
    {"overlong_tokens": 9, "overlong_buffer": 9, "credit": "trajectory", "baseline": "none", "normalization": "none"},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("parts", CHOICES, ids=lambda parts: "-".join(map(str, parts.values())))
def test_advantages_equal_the_loop(parts: dict[str, Any], seed: int) -> None:
    algorithm, batch = Algorithm(**parts), random_groups(seed)
    for got, expected in zip(turn_advantages(batch, algorithm), by_hand(batch, algorithm), strict=True):
        assert got.dtype == np.float32
        assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def token_by_token(batch: list[TrajectoryTokens], costs: list[Any]) -> list[TrajectoryTokens]:
    """The same with every sampled token a turn of its own, whose return is what is left of its turn's."""
    whole: dict[str, float] = {}
    for t, cost in zip(batch, costs, strict=True):
        whole[t.episode_id] = whole.get(t.episode_id, 0.0) + sum(float(c) for c in cost)
    found = []
    for t, cost in zip(batch, costs, strict=True):
        sampled = np.flatnonzero(t.turn_ids >= 0)
        turn_ids = np.full(len(t.turn_ids), -1, np.int32)
        turn_ids[sampled] = np.arange(len(sampled))
        left = [float(t.turn_returns[t.turn_ids[at]]) - sum(float(c) for c in cost[at:]) for at in sampled]
        found.append(
            dataclasses.replace(
                t,
                turn_ids=turn_ids,
                turn_returns=np.array(left),
                episode_return=t.episode_return - whole[t.episode_id],
            )
        )
    return found


COSTED = [p for p in CHOICES if p.get("preset") not in ("gdpo", "gigpo") and "step_weight" not in p]
"""Those whose advantages of tokens are those of turns of one token."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("parts", COSTED, ids=lambda parts: "-".join(map(str, parts.values())))
def test_penalized_advantages_equal_the_loop(parts: dict[str, Any], seed: int) -> None:
    algorithm, batch = Algorithm(**parts), random_groups(seed)
    rng = np.random.default_rng(seed)
    costs = [(rng.normal(0, 0.2, len(t.loss_mask)) * t.loss_mask).astype(np.float32) for t in batch]
    expected = by_hand(token_by_token(batch, costs), algorithm)
    for t, got, wanted in zip(batch, penalized_advantages(batch, algorithm, costs), expected, strict=True):
        assert got.dtype == np.float32
        assert got[t.loss_mask].tolist() == pytest.approx(
            np.array(wanted)[t.loss_mask[t.turn_ids >= 0]].tolist(), rel=1e-5, abs=1e-5
        )
        assert not got[~t.loss_mask].any()


@pytest.mark.parametrize("preset", [name for name in OF_RETURNS if name != "gdpo"])
def test_zero_costs_do_not_change_advantages(preset: str) -> None:
    algorithm, batch = Algorithm(preset=preset), random_groups(0)
    free = penalized_advantages(batch, algorithm, [np.zeros(len(t.loss_mask), np.float32) for t in batch])
    for t, got, turns in zip(batch, free, turn_advantages(batch, algorithm), strict=True):
        np.testing.assert_array_equal(got[t.loss_mask], token_advantages(t, turns)[t.loss_mask])


def test_whitened_tokens_have_mean_0_and_deviation_1() -> None:
    batch = random_groups(0)
    turns = turn_advantages(batch, Algorithm(preset="reinforce++"))
    tokens = np.concatenate([token_advantages(t, a)[t.loss_mask] for t, a in zip(batch, turns, strict=True)])
    assert tokens.mean() == pytest.approx(0, abs=1e-6)
    assert tokens.std() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("preset", OF_RETURNS)
def test_an_empty_batch_and_one_without_loss_tokens(preset: str) -> None:
    algorithm = Algorithm(preset=preset)
    assert turn_advantages([], algorithm) == []
    silent = [dataclasses.replace(t, loss_mask=np.zeros_like(t.loss_mask)) for t in random_groups(0)]
    found = turn_advantages(silent, algorithm)
    assert all(np.isfinite(a).all() for a in found)
    assert [len(a) for a in found] == [len(t.turn_returns) for t in silent]
    assert algorithm.normalization != "whiten" or not any(a.any() for a in found)


# -- what is compared with what ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", GROUP_RELATIVE)
def test_a_group_of_one_and_a_tied_group_have_no_advantage(preset: str) -> None:
    alone = [trajectory("g1", "s0", 1.0)]
    tied = [trajectory("g2", f"s{i}", 0.7) for i in range(1, 4)]
    assert all(not a.any() for a in turn_advantages(alone + tied, Algorithm(preset=preset)))


def test_a_session_with_many_paths_counts_once_in_the_baseline() -> None:
    group = [trajectory("g", "s0", 1.0)] * 5 + [trajectory("g", "s1", 0.0)]
    assert [a.item() for a in turn_advantages(group, Algorithm(preset="dr_grpo"))] == [0.5] * 5 + [-0.5]


def test_gdpo_tells_episodes_apart_whose_rewards_have_the_same_sum() -> None:
    """The example of its paper: rewards (0, 1) and (0, 2) are the same to GRPO after normalisation, and not to GDPO."""
    both = [
        dataclasses.replace(trajectory("g", name, a + b), named_returns={"right": a, "form": b})
        for name, a, b in [("a", 1.0, 0.0), ("b", 0.0, 1.0), ("c", 1.0, 1.0), ("d", 1.0, 0.0)]
    ]
    grpo, gdpo = ([x.item() for x in turn_advantages(both, Algorithm(preset=p))] for p in ("grpo", "gdpo"))
    assert grpo[0] == grpo[1] == grpo[3]
    assert gdpo[0] == gdpo[3] != gdpo[1]
    assert np.mean(gdpo) == pytest.approx(0, abs=1e-6)
    assert np.std(gdpo) == pytest.approx(1, rel=1e-4)


def test_groups_do_not_mix() -> None:
    groups = [
        trajectory("g1", "a", 0.0),
        trajectory("g1", "b", 1.0),
        trajectory("g2", "c", 10.0),
        trajectory("g2", "d", 12.0),
    ]
    assert [a.item() for a in turn_advantages(groups, Algorithm(preset="dr_grpo"))] == [-0.5, 0.5, -1.0, 1.0]


def test_each_turn_is_measured_against_the_session_baseline_and_broadcast_on_its_tokens() -> None:
    group = [trajectory("g", "s0", 0.5, [0.5, 1.0]), trajectory("g", "s1", 0.0, [0.0, 0.0])]
    turns = turn_advantages(group, Algorithm(preset="dr_grpo"))
    assert turns[0].tolist() == [0.25, 0.75]
    tokens = token_advantages(group[0], turns[0])
    assert tokens.tolist() == [0, 0, *[0.25] * 5, 0, 0, 0, *[0.75] * 5]
    assert tokens.dtype == np.float32


def test_with_trajectory_credit_every_turn_has_its_episodes_advantage() -> None:
    group = [trajectory("g", "s0", 0.5, [0.5, 1.0]), trajectory("g", "s1", 0.0, [0.0, 0.0])]
    turns = turn_advantages(group, Algorithm(preset="dr_grpo", credit="trajectory"))
    assert [a.tolist() for a in turns] == [[0.25, 0.25], [-0.25, -0.25]]


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (60, 0.0), (61, -0.05), (70, -0.5), (80, -1.0), (200, -1.0)]
)
def test_overlong_shaping(tokens: int, expected: float) -> None:
    algorithm = Algorithm(preset="dapo", overlong_tokens=80, overlong_buffer=20)
    assert overlong_penalty(tokens, algorithm) == pytest.approx(expected)
    assert overlong_penalty(tokens, Algorithm()) == 0


def test_an_episode_without_sampled_tokens_is_not_too_long() -> None:
    algorithm = Algorithm(preset="dapo", overlong_tokens=4, overlong_buffer=4)
    silent = trajectory("g", "s0", 1.0)
    silent = dataclasses.replace(silent, turn_ids=np.full_like(silent.turn_ids, -1))
    assert overlong_penalties([silent], algorithm) == {"s0": 0.0}


@pytest.mark.parametrize(("credit", "expected"), [("turn", [1.0, 1 + LARGE, 2 + LARGE]), ("trajectory", [1.0] * 3)])
def test_costs_are_added_up_in_float64(credit: str, expected: list[float]) -> None:
    """Near LARGE a float32 has no ones: added up in float32, the three together cost nothing."""
    batch = [trajectory("g", "s0", 2.0, output=3)]
    costs = np.zeros(len(batch[0].turn_ids), np.float32)
    costs[batch[0].loss_mask] = [LARGE, 1.0, -LARGE]
    algorithm = Algorithm(baseline="none", normalization="none", credit=credit)
    (found,) = penalized_advantages(batch, algorithm, [costs])
    assert found[batch[0].loss_mask].tolist() == pytest.approx(expected)


def test_each_trajectory_needs_its_costs() -> None:
    batch = random_groups(0)[:2]
    with pytest.raises(ValueError, match="shorter"):
        penalized_advantages(batch, Algorithm(), [np.zeros(len(batch[0].turn_ids), np.float32)])


def test_whitening_compares_turns_where_all_episodes_returned_the_same() -> None:
    group = [trajectory("g", f"s{i}", 1.0, [turn, 1.0]) for i, turn in enumerate([0.0, 1.0, 2.0])]
    found = turn_advantages(group, Algorithm(baseline="none", normalization="whiten"))
    deviation = (2 / 6) ** 0.5
    assert [a[0] for a in found] == pytest.approx([-1 / deviation, 0, 1 / deviation], abs=1e-5)


ORDERS = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.1, 0.3), (0.3, 0.1, 0.2)]


@pytest.mark.parametrize("preset", GROUP_RELATIVE)
@pytest.mark.parametrize("value", [1.0, -1.0, 1e6])
def test_the_order_of_equal_rewards_gives_no_advantage(preset: str, value: float) -> None:
    group = [trajectory("g", f"s{i}", value * sum(order)) for i, order in enumerate(ORDERS)]
    assert len({t.episode_return for t in group}) > 1
    assert [a.tolist() for a in turn_advantages(group, Algorithm(preset=preset))] == [[0.0]] * 4


def test_batches_of_equal_returns_have_no_scale() -> None:
    group = [trajectory("g", f"s{i}", sum(order)) for i, order in enumerate(ORDERS)]
    algorithm = Algorithm(baseline="none", normalization="batch_std")
    assert [a.tolist() for a in turn_advantages(group, algorithm)] == [[0.0]] * 4


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_advantages_are_finite_and_sum_to_nothing(values: list[float]) -> None:
    group = [trajectory("g", f"s{i}", value) for i, value in enumerate(values)]
    found = [a.item() for a in turn_advantages(group, Algorithm())]
    assert sum(found) == pytest.approx(0, abs=1e-5)
    assert max(map(abs, found)) <= len(values)
