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


def test_some_are_always_allowed() -> None:
    assert taken(RetryBudget(), T) == FLOOR


def test_a_share_of_the_calls_and_one_for_each_under_way() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.call(T)
    assert taken(budget, T, under_way=50) == FLOOR + SHARE * 1000 + 50
    assert not budget.take(T + WINDOW_S - 1, 50)


def test_what_was_spent_counts_for_a_window_after_its_own() -> None:
    budget = RetryBudget()
    taken(budget, T)
    assert not budget.take(T + WINDOW_S, 0)
    assert taken(budget, T + 2 * WINDOW_S, 0) == FLOOR


def test_a_long_silence_forgets_everything() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.call(T)
    assert taken(budget, T + 10 * WINDOW_S) == FLOOR
