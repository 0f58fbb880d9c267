"""pass@k and best@k against the mean over all choices of k samples."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from agentrl.domain.majority import MOST_SAMPLES
from agentrl.domain.sample_metrics import best_at, of_tasks, pass_at, sizes


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.5, 1.0, -2.0], [1.0] * 4, [0.0] * 3, [0.3]])
def test_they_are_means_over_all_choices(rewards: list[float]) -> None:
    for k in range(1, len(rewards) + 1):
        choices = list(combinations(rewards, k))
        assert best_at(k, rewards) == pytest.approx(fmean(map(max, choices)))
        assert pass_at(k, rewards) == pytest.approx(fmean(max(choice) >= 1.0 for choice in choices))


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
