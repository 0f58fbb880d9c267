"""The experts of a path: those of its calls, in their places; positions that are computed again are marked."""

from __future__ import annotations

import numpy as np
import pytest

from agentrl.domain.experts.routed_experts import CallRouting, RoutedExperts, RouteOrigin
from agentrl.store.calls import call_routing

MISSING, RECORDED, RECOMPUTED = RouteOrigin


def routing(start: int, rows: int, *, computed_from: int | None = None, fill: int = 1, layers: int = 2) -> CallRouting:
    ids = np.full((rows, layers, 1), fill, np.uint8)
    experts = RoutedExperts(ids, np.full(rows, RECORDED, np.uint8))
    return CallRouting(start=start, computed_from=start if computed_from is None else computed_from, experts=experts)


def test_each_call_fills_its_own_positions() -> None:
    found = call_routing.of_path([routing(0, 4, fill=1), routing(4, 3, fill=2)], 8)
    assert found.ids[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert found.origins.tolist() == [RECORDED] * 7 + [MISSING]


def test_positions_of_a_call_without_experts_are_missing() -> None:
    found = call_routing.of_path([routing(3, 3)], 9)
    assert found.origins.tolist() == [MISSING] * 3 + [RECORDED] * 3 + [MISSING] * 3


def test_positions_that_a_later_call_computed_again_are_marked_with_their_first_choice() -> None:
    found = call_routing.of_path([routing(0, 4, fill=1), routing(4, 3, fill=2, computed_from=2)], 8)
    assert found.origins.tolist() == [RECORDED] * 2 + [RECOMPUTED] * 2 + [RECORDED] * 3 + [MISSING]
    assert found.ids[:4, 0, 0].tolist() == [1] * 4


def test_calls_of_two_models_or_beyond_the_path_are_refused() -> None:
    for calls in ([routing(0, 2), routing(2, 2, layers=3)], [routing(0, 9)]):
        with pytest.raises(ValueError, match="in a path of"):
            call_routing.of_path(calls, 8)
