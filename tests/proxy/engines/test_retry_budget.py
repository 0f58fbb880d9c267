"""Resubmissions stay in proportion to calls."""

from __future__ import annotations

from agentrl.proxy.engines.retry_budget import FLOOR, SHARE, WINDOW_S, RetryBudget

T = 1000.0


def taken(budget: RetryBudget, now: float, under_way: int = 0) -> int:
    """How many retries are left."""
    count = 0
    while budget.take(now, under_way):
        count += 1
    return count


def test_a_minimum_of_retries_is_always_allowed() -> None:
    assert taken(RetryBudget(), T) == FLOOR


def test_the_budget_is_a_share_of_the_calls_and_one_for_each_under_way() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.call(T)
    assert taken(budget, T, under_way=50) == FLOOR + SHARE * 1000 + 50
    assert not budget.take(T + WINDOW_S - 1, 50)


def test_retries_count_in_their_window_and_the_next() -> None:
    budget = RetryBudget()
    taken(budget, T)
    assert not budget.take(T + WINDOW_S, 0)
    assert taken(budget, T + 2 * WINDOW_S, 0) == FLOOR


def test_the_budget_is_reset_after_a_long_silence() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.call(T)
    assert taken(budget, T + 10 * WINDOW_S) == FLOOR
