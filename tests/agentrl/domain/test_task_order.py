"""The order of tasks: every pass visits each task once, sources have their shares, and arrival changes nothing."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.task_order import drawn, pick, position, rising, shares, shuffled


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000])
def test_a_shuffle_is_a_permutation_that_depends_on_its_key(size: int) -> None:
    one, other = ([shuffled(i, size, key) for i in range(size)] for key in ("1", "2"))
    assert sorted(one) == list(range(size))
    assert size <= 5 or one != other
    assert one == [shuffled(i, size, "1") for i in range(size)]


def test_a_shuffle_moves_tasks_everywhere() -> None:
    """Neighbours part: the mean distance of two neighbours is a third of the size, as for random order."""
    size = 3000
    found = [shuffled(i, size, "k") for i in range(size)]
    distance = sum(abs(a - b) for a, b in pairwise(found)) / (size - 1)
    assert 0.3 * size < distance < 0.37 * size


@pytest.mark.parametrize("block", [1, 4, 100])
def test_each_pass_visits_every_task_once(block: int) -> None:
    visits = [position(draw, stored=10, complete=True, block=block, key="k") for draw in range(30)]
    passes = [visits[i : i + 10] for i in (0, 10, 20)]
    assert [sorted(one) for one in passes] == [list(range(10))] * 3  # type: ignore[type-var]
    assert (passes[0] == passes[1]) == (block == 1)
    assert passes[1] == passes[2] or block > 1


def test_the_order_of_the_first_pass_does_not_depend_on_how_much_is_stored() -> None:
    whole = [position(draw, stored=10, complete=True, block=4, key="k") for draw in range(10)]
    for stored in range(11):
        partly = [position(draw, stored=stored, complete=False, block=4, key="k") for draw in range(10)]
        there = stored // 4 * 4
        assert partly == whole[:there] + [None] * (10 - there)


def test_sources_have_their_shares_in_each_cycle_and_lose_no_draw() -> None:
    assert shares((2.0, 1.0, 1.0)) == (2, 1, 1)
    assert shares((0.1, 0.1, 0.1)) == (1, 1, 1)
    assert shares((3.14159, 1.0)) == (759, 241)
    picked = [pick(cursor, (2.0, 1.0, 1.0), 7) for cursor in range(400)]
    assert Counter(source for source, _ in picked) == {0: 200, 1: 100, 2: 100}
    for source in range(3):
        draws = [draw for of, draw in picked if of == source]
        assert draws == list(range(len(draws)))
    cycles = [tuple(source for source, _ in picked[i : i + 4]) for i in range(0, 400, 4)]
    assert len(set(cycles)) > 4
    assert picked != [pick(cursor, (2.0, 1.0, 1.0), 8) for cursor in range(400)]


def test_a_share_that_no_cycle_has_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="1/1000"):
        shares((1.0, 5000.0))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (3.0, 1.0, 0.5), (1.0, 2**0.5)])
def test_what_a_cursor_leaves_behind_is_what_earlier_ones_drew(weights: tuple[float, ...]) -> None:
    before = [0] * len(weights)
    for cursor in range(2500):
        assert drawn(cursor, weights, 5) == before
        source, draw = pick(cursor, weights, 5)
        assert draw == before[source]
        before[source] += 1


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(1, 80), st.integers(0, 3))
def test_the_window_rises_from_the_easiest_to_the_hardest(stored: int, width: float, over: int, seed: int) -> None:
    size = min(stored, math.ceil(width * stored - 1e-9))
    before = 0
    for draw in range(over):
        number, position = rising(draw, stored=stored, width=width, over=over, key=str(seed))
        start = math.floor((stored - size) * Fraction(draw, max(1, over - 1)) + Fraction(1, 2))
        assert number == 0
        assert before <= start <= position < start + size <= stored
        before = start
    if over > 1:
        assert before == stored - size
    for number in (1, 2):  # then whole passes
        draws = range(over + (number - 1) * stored, over + number * stored)
        found = [rising(draw, stored=stored, width=width, over=over, key=str(seed)) for draw in draws]
        assert {of_pass for of_pass, _ in found} == {number}
        assert sorted(position for _, position in found) == list(range(stored))


def test_a_window_draws_all_of_its_tasks_by_the_seed() -> None:
    def drawn(key: str) -> list[int]:
        return [rising(draw, stored=40, width=0.25, over=2000, key=key)[1] for draw in range(2000)]

    assert drawn("0") == drawn("0") != drawn("1")
    assert set(drawn("0")) == set(range(40))
    assert max(drawn("0")[:20]) <= 11
    assert min(drawn("0")[-20:]) >= 28
