"""pass@k, best@k and best_of@k against the mean over all choices of k samples."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.majority import MOST_SAMPLES
from agentrl.domain.sample_metrics import Scored, best_at, best_of_at, of_tasks, pass_at, scored, sizes


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.5, 1.0, -2.0], [1.0] * 4, [0.0] * 3, [0.3]])
def test_they_are_means_over_all_choices(rewards: list[float]) -> None:
    for k in range(1, len(rewards) + 1):
        choices = list(combinations(rewards, k))
        assert best_at(k, rewards) == pytest.approx(fmean(map(max, choices)))
        assert pass_at(k, rewards) == pytest.approx(fmean(max(choice) >= 1.0 for choice in choices))


def test_the_choices_of_many_samples_are_more_than_a_float_holds() -> None:
    assert best_at(1024, [0.5] * 2048) == pytest.approx(0.5)
    assert best_of_at(1024, [Scored(reward=0.5, score=float(i)) for i in range(2048)]) == pytest.approx(0.5)


def test_tasks_count_alike_and_k_goes_up_to_the_fewest_samples() -> None:
    found = of_tasks([[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    assert found == {
        "pass": {"1": 0.125, "2": 0.25, "3": 0.375},
        "best": {"1": pytest.approx(5 / 24), "2": pytest.approx(5 / 12), "3": pytest.approx(0.625)},
        "avg": {"3": pytest.approx(5 / 24)},
    }
    assert of_tasks([[1.0], [0.0, 1.0]]) == of_tasks([]) == {}


def test_the_majority_is_reported_where_samples_have_answers() -> None:
    rewards = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    found = of_tasks(rewards, [["x", "x", "y"], ["x", None, None]])
    assert found["maj"] == {"1": pytest.approx(0.5), "2": pytest.approx(0.5), "3": pytest.approx((1 + 1 / 3) / 2)}
    assert "maj" not in of_tasks(rewards, [[None] * 3, [None] * 3])
    many = [[1.0] * (MOST_SAMPLES + 1)]
    assert "maj" not in of_tasks(many, [["x"] * len(many[0])])


def test_the_numbers_of_samples_are_powers_of_two_and_the_number_itself() -> None:
    assert (sizes(1), sizes(4), sizes(6)) == ([1], [1, 2, 4], [1, 2, 4, 6])


SAMPLES = st.lists(
    st.builds(Scored, st.none() | st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.floats(-3, 3)), min_size=1, max_size=8
)


def chosen(choice: tuple[Scored, ...]) -> float:
    """The mean true reward of the samples with the highest score: chance decides between them."""
    having = [one for one in choice if one.score is not None]
    if not having:
        return fmean(one.reward for one in choice)
    highest = max(one.score for one in having if one.score is not None)
    return fmean(one.reward for one in having if one.score == highest)


@given(SAMPLES)
def test_best_of_is_the_mean_over_all_choices(samples: list[Scored]) -> None:
    for k in range(1, len(samples) + 1):
        expected = fmean(map(chosen, combinations(samples, k)))
        assert best_of_at(k, samples) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_the_true_reward_as_the_score_gives_best_at_k(rewards: list[float]) -> None:
    for k in range(1, len(rewards) + 1):
        found = best_of_at(k, [Scored(reward, reward) for reward in rewards])
        assert found == pytest.approx(best_at(k, rewards), rel=1e-9, abs=1e-9)


def test_a_score_that_samples_exploit_falls_with_k() -> None:
    found = of_tasks([[1.0, 0.0, 0.0]], choices=[[Scored(0.0, 1.0), Scored(1.0, 0.0), Scored(2.0, 0.0)]])
    assert found["best_of"] == {"1": pytest.approx(1 / 3), "2": 0.0, "3": 0.0}
    assert "best_of" not in of_tasks([[1.0, 0.0]], choices=[[Scored(None, 1.0), Scored(None, 0.0)]])


@pytest.mark.parametrize(
    ("by", "counted", "expected"),
    [
        ("judge", None, Scored(0.5, 1.25)),
        ("judge", ["right"], Scored(0.5, 1.0)),
        ("judge.b", None, Scored(0.25, 1.5)),
        ("right", None, Scored(1.0, 0.75)),
        ("taste", None, Scored(7.0, 1.75)),
        ("taste", ["right", "judge"], Scored(7.0, 1.5)),
        ("style", None, Scored(3.0, 1.75)),
        ("warm", None, Scored(4.0, 1.75)),
        ("jud", None, Scored(None, 1.75)),
    ],
)
def test_a_score_is_a_reward_or_a_measured_number(by: str, counted: list[str] | None, expected: Scored) -> None:
    rewards = {"right": 1.0, "form": 0.25, "judge.a": 0.25, "judge.b": 0.25}
    stats = {"taste": 7.0, "judge": 9.0, "style.x": 1.0, "style.y": 2.0, "reward/warm": 4.0, "reward/taste": 5.0}
    assert scored(rewards, stats, by, counted) == expected
