"""Intervals against tables, against a numerical integral, and against what they promise: coverage."""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.intervals import Interval, bounded, of_gain, of_rewards, student, t_quantile, wilson

# Student's t, 97.5 %: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 10: 2.228, 30: 2.042, 63: 1.998, 100: 1.984}


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_quantiles_are_those_of_the_table(freedom: int, value: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 8, 63, 501, 5000])
@pytest.mark.parametrize("p", [0.5, 0.6, 0.9, 0.975, 0.999])
def test_quantiles_invert_the_integral_of_the_density(freedom: int, p: float) -> None:
    t = t_quantile(p, freedom)
    x, step = np.linspace(0.0, t, 200_001, retstep=True)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    simpson = step / 3 * (density[0] + 4 * density[1:-1:2].sum() + 2 * density[2:-1:2].sum() + density[-1])
    assert 0.5 + simpson == pytest.approx(p, abs=1e-6)


def test_a_share_has_wilsons_interval() -> None:
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        found = of_rewards([[1.0]] * successes + [[0.0]] * (n - successes))
        assert [found.low, found.high] == pytest.approx([low, high], abs=5e-5)
        assert found.mean == successes / n


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_bounds_are_the_shares_that_a_score_test_just_accepts(share: tuple[int, int]) -> None:
    successes, n = share
    found, z = wilson(successes, n), NormalDist().inv_cdf(0.975)
    for bound in (found.low, found.high):
        assert bound is not None
        assert 0 <= bound <= 1
        if 1e-9 < bound < 1 - 1e-9:
            assert abs(found.mean - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / n), rel=1e-6, abs=1e-9)


def test_student_is_the_textbooks() -> None:
    found = student([4.0, 6.0, 8.0])  # s = 2, 2·4.3027/√3
    assert found == Interval(6.0, pytest.approx(1.0317, abs=1e-4), pytest.approx(10.9683, abs=1e-4))


def test_one_task_has_no_interval() -> None:
    assert of_rewards([[0.25, 0.75]]) == Interval(0.5, None, None)
    with pytest.raises(ValueError, match="at least one"):
        of_rewards([])
    with pytest.raises(ValueError, match="at least one"):
        of_rewards([[1.0], []])


def test_repeating_every_sample_makes_nothing_more_certain() -> None:
    once = of_rewards([[0.0], [0.5], [1.0], [0.5]])
    again = of_rewards([[0.0] * 9, [0.5] * 9, [1.0] * 9, [0.5] * 9])
    assert once == again
    assert of_rewards([[1.0] * 9] * 4) == wilson(4, 4)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=4), min_size=2, max_size=12), st.randoms())
def test_the_interval_is_around_the_mean_and_order_does_not_matter(by_task: list[list[float]], rng: random.Random):
    found = of_rewards(by_task)
    assert found.mean == pytest.approx(fmean(fmean(samples) for samples in by_task), abs=1e-9)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.mean + 1e-9
    assert found.mean <= found.high + 1e-9
    rng.shuffle(by_task)
    shuffled = of_rewards(by_task)
    assert [shuffled.low, shuffled.high] == pytest.approx([found.low, found.high], abs=1e-9)


def ends(found: Interval) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def covered(draw, truth: float, rounds: int = 2000) -> float:
    rng = random.Random(7)
    intervals = [of_rewards(draw(rng)) for _ in range(rounds)]
    return fmean(i.low <= truth <= i.high for i in intervals)  # type: ignore[operator]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """2000 evaluations of 32 tasks; the share that covers has a standard deviation of half a percent."""

    def shares(rng: random.Random) -> list[list[float]]:
        return [[float(rng.random() < 0.3)] for _ in range(32)]

    def clustered(rng: random.Random) -> list[list[float]]:
        hardness = [rng.betavariate(1, 2) for _ in range(32)]  # of a mean of 1/3
        return [[float(rng.random() < p) for _ in range(8)] for p in hardness]

    def partial(rng: random.Random) -> list[list[float]]:
        return [[rng.betavariate(2, 3)] for _ in range(32)]

    assert 0.93 <= covered(shares, 0.3) <= 0.97
    assert 0.93 <= covered(clustered, 1 / 3) <= 0.97
    assert 0.93 <= covered(partial, 0.4) <= 0.97

    def as_if_independent(rng: random.Random) -> list[list[float]]:
        return [[reward] for samples in clustered(rng) for reward in samples]

    assert covered(as_if_independent, 1 / 3) < 0.85  # what clustering is for


def test_rewards_in_the_unit_interval_have_intervals_there_that_cover_more_often_than_students() -> None:
    """1000 evaluations of 8 tasks with 4 samples each; one sample in 31 succeeds."""

    def rare(rng: random.Random) -> list[list[float]]:
        return [[float(rng.random() < p) for _ in range(4)] for p in (rng.betavariate(1, 30) for _ in range(8))]

    rng = random.Random(3)
    drawn = [rare(rng) for _ in range(1000)]
    found = [ends(of_rewards(by_task)) for by_task in drawn]
    unbounded = [ends(student([fmean(samples) for samples in by_task])) for by_task in drawn]
    assert all(0 <= low <= high <= 1 for low, high in found)
    assert any(low < 0 for low, _ in unbounded)
    assert fmean(low <= 1 / 31 <= high for low, high in found) >= 0.95
    assert fmean(low <= 1 / 31 <= high for low, high in unbounded) < 0.75


UNIT = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=8)


@given(UNIT, UNIT)
def test_bounded_rewards_and_gains_have_bounded_intervals(before: list[list[float]], after: list[list[float]]) -> None:
    found = of_rewards(before)
    if found.low is not None and found.high is not None:
        assert 0 <= found.low <= found.mean + 1e-9
        assert found.mean - 1e-9 <= found.high <= 1
    gain = of_gain(dict(enumerate(before)), dict(enumerate(after)))
    assert gain is not None
    if gain.low is not None and gain.high is not None:
        assert -1 <= gain.low <= gain.mean + 1e-9
        assert gain.mean - 1e-9 <= gain.high <= 1


def test_a_reward_outside_the_unit_interval_bounds_nothing() -> None:
    by_task = [[1.0], [1.0], [1.5]]
    assert of_rewards(by_task) == student([1.0, 1.0, 1.5])
    before = {0: [0.0], 1: [0.0], 2: [-1.0]}
    gain = of_gain(before, dict(enumerate(by_task)))
    assert gain == student([1.0, 1.0, 2.5])
    assert ends(gain)[1] > 1.5


def test_a_bounded_mean_in_the_middle_has_students_interval() -> None:
    values = [0.5 + 0.001 * (-1) ** i for i in range(40)]
    found, plain = bounded(values), student(values)
    assert [found.low, found.high] == pytest.approx([plain.low, plain.high], abs=1e-6)


def test_0_1_values_have_wilsons_interval_but_for_students_quantile() -> None:
    values = [1.0] * 30 + [0.0] * 10  # n* = n - 1, because the variance of a sample is divided by n - 1
    found, plain = bounded(values), wilson(30, 40)
    assert [found.low, found.high] == pytest.approx([plain.low, plain.high], abs=0.01)
    assert ends(found)[0] < ends(plain)[0]
    assert ends(plain)[1] < ends(found)[1]
    assert bounded([1.0] * 7) == wilson(7, 7)
    assert bounded([0.25, 0.25]) == Interval(0.25, 0.25, 0.25)
    assert bounded([0.25]) == Interval(0.25, None, None)


def test_a_gain_is_paired_by_task() -> None:
    before = {0: [0.0], 1: [0.5], 2: [0.9], 9: [0.0]}
    after = {0: [0.1], 1: [0.5, 0.7], 2: [1.0], 7: [1.0]}
    assert of_gain(before, after) == Interval(pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))
    assert of_gain({0: [1.0]}, {1: [1.0]}) is None
