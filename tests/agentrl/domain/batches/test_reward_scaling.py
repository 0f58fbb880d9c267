"""Running statistics of rewards, and what is trained of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium.wrappers.utils import RunningMeanStd
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.batches import reward_scaling
from agentrl.domain.batches.reward_scaling import Moments, RewardScaling, Scale, Series
from agentrl.domain.credit import counting

values = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=30)
batches = st.lists(values, min_size=1, max_size=5)


def moments_of(xs: list[float]) -> Moments:
    found = Moments()
    for x in xs:
        found = found.and_value(x)
    return found


@given(batches)
def test_moments_are_those_of_all_values(of_batches: list[list[float]]) -> None:
    flat = np.array([x for xs in of_batches for x in xs], np.float64)
    one_by_one = moments_of(flat.tolist())
    joined = Moments()
    for xs in of_batches:
        joined = joined.and_moments(moments_of(xs))
    for found in (one_by_one, joined):
        assert found.n == len(flat)
        assert found.mean == pytest.approx(flat.mean(), abs=1e-6)
        assert found.deviation == pytest.approx(flat.std(), abs=1e-6)


@given(batches)
def test_gymnasium_computes_the_same_statistics(of_batches: list[list[float]]) -> None:
    theirs = RunningMeanStd(epsilon=0.0, shape=(), dtype=np.float64)  # what NormalizeReward divides by
    ours = Moments()
    for xs in of_batches:
        theirs.update(np.array(xs, np.float64))
        ours = ours.and_moments(moments_of(xs))
    assert ours.mean == pytest.approx(float(theirs.mean), abs=1e-6)
    assert ours.deviation == pytest.approx(float(np.sqrt(theirs.var)), abs=1e-6)


def test_no_values_have_no_deviation() -> None:
    assert Moments().deviation == 0
    assert Moments().and_moments(Moments()) == Moments()


@given(values, st.floats(-1e4, 1e4), st.sampled_from([0.5, -2.0, 1.0]))
def test_a_value_is_normalised_then_clipped_then_weighed(xs: list[float], x: float, weight: float) -> None:
    known = moments_of(xs)
    scale = Scale(normalize="running", clip=(-1.5, 2.0), weight=weight)
    score = (x - np.mean(xs)) / (np.std(xs) + 1e-6) if known.deviation > 1e-6 else 0.0
    expected = weight * np.clip(score, -1.5, 2.0)
    assert scale.apply(x * weight, known) == pytest.approx(expected, rel=1e-6, abs=1e-3)
    assert Scale(clip=(-1.0, 1.0), weight=weight).apply(x * weight, known) == weight * min(max(x, -1.0), 1.0)


def scaling(**scales: Scale) -> RewardScaling:
    return RewardScaling(scales)


def test_without_a_deviation_there_is_no_scale() -> None:
    scale = Scale(normalize="running")
    for xs in ([], [0.0] * 5, [0.1] * 7):
        assert scale.apply(1.0, moments_of(xs)) == 0.0


def test_components_have_statistics_of_their_own_for_each_name_and_source() -> None:
    s = scaling(style=Scale(normalize="running"), fit=Scale(normalize="running_per_source", weight=2.0)).with_rewards(
        [
            ("a", "style", 1.0),
            ("b", "style", 3.0),
            ("a", "style.x", 5.0),
            ("a", "fit", 2.0),
            ("b", "fit", 8.0),
            ("a", "other", 9.0),
        ]
    )
    assert s.moments == {
        Series("", "style"): Moments(2, 2.0, 2.0),
        Series("", "style.x"): Moments(1, 5.0, 0.0),
        Series("a", "fit"): Moments(1, 1.0, 0.0),  # of the function's values: the recorded ones have the weight
        Series("b", "fit"): Moments(1, 4.0, 0.0),
    }
    assert s.of_names()["fit"] == Moments(2, 2.5, 4.5)


def test_the_longest_fitting_component_scales_a_reward() -> None:
    s = scaling(**{"a": Scale(clip=(0, 1)), "a.b": Scale(clip=(0, 2))})
    found = s.scaled("", counting([(None, "session", name, 9.0) for name in ("a", "a.b", "a.b.c", "a.c", "ab")]))
    assert {name: own.session for name, own in found.named.items()} == {
        "a": 1.0,
        "a.b": 2.0,
        "a.b.c": 2.0,
        "a.c": 1.0,
        "ab": 9.0,
    }
    assert found.session == 15.0


def test_rewards_of_sessions_calls_and_branches_are_scaled() -> None:
    s = scaling(r=Scale(clip=(-1, 1)))
    given_rewards = [(None, "session", "r", 4.0), ("c", "call", "r", -3.0), ("c", "branch", "r", 0.5)]
    found = s.scaled("", counting([*given_rewards, ("c", "call", "own", 7.0)]))
    assert (found.session, found.calls, found.branches) == (1.0, {"c": 6.0}, {"c": 0.5})
    untouched = counting([(None, "session", "own", 7.0)])
    assert s.scaled("", untouched) is untouched


def test_a_component_without_normalisation_has_no_statistics() -> None:
    assert scaling(r=Scale(clip=(0, 1))).with_rewards([("", "r", 3.0)]).moments == {}


def test_sources_beyond_the_most_share_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_scaling, "MOST_SERIES", 2)
    s = scaling(r=Scale(normalize="running_per_source")).with_rewards(
        [("a", "r", 1.0), ("b", "r", 2.0), ("c", "r", 3.0), ("d", "r", 5.0), ("a", "r", 7.0)]
    )
    assert s.moments[Series("", "r")] == Moments(2, 4.0, 2.0)
    assert s.moments[Series("a", "r")].n == 2
    assert s.scaled("d", counting([(None, "session", "r", 5.0)])).session == pytest.approx(1.0, abs=1e-5)


@given(batches)
def test_the_stored_form_is_exact(of_batches: list[list[float]]) -> None:
    s = scaling(r=Scale(normalize="running_per_source", clip=(-1.0, 0.1), weight=0.3), q=Scale(normalize="running"))
    for i, xs in enumerate(of_batches):
        s = s.with_rewards([(f"s{i}", name, x) for x in xs for name in ("r", "q")])
    assert RewardScaling.from_json(json.loads(json.dumps(s.to_json()))) == s
