"""Prefix trees, balance and first-fit decreasing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.batching import PrefixTree, balance, build_tree, line_up, pack, split_by_budget

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)
sizes = st.lists(st.integers(1, 20), min_size=1, max_size=20)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(r, np.int32) for r in rows]


def test_the_tree_of_the_docstring() -> None:
    tree = build_tree(arrays([[1, 2, 3, 4], [1, 2, 5, 6]]))
    assert tree.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.positions.tolist() == [0, 1, 2, 3, 2, 3]
    assert tree.ends.tolist() == [6, 6, 4, 4, 6, 6]
    assert [p.tolist() for p in tree.paths] == [[0, 1, 2, 3], [0, 1, 4, 5]]


def shows_each_token_its_own_past(tree: PrefixTree, rows: list[list[int]]) -> bool:
    nodes = np.arange(len(tree))
    for row, path in zip(rows, tree.paths, strict=True):
        last = path[-1]
        seen = nodes[(nodes <= last) & (last < tree.ends)]
        if tree.token_ids[path].tolist() != row or seen.tolist() != path.tolist():
            return False
        if tree.positions[path].tolist() != list(range(len(row))):
            return False
    return {a.dtype for a in (tree.token_ids, tree.positions, tree.ends, *tree.paths)} == {np.dtype(np.int32)}


@given(sequences)
def test_a_tree_holds_each_distinct_prefix_once_and_shows_a_token_its_own_past(rows: list[list[int]]) -> None:
    tree = build_tree(arrays(rows))
    assert len(tree) == len({tuple(r[: i + 1]) for r in rows for i in range(len(r))})
    assert shows_each_token_its_own_past(tree, rows)


@given(sequences)
def test_sequences_in_a_line_share_nothing_and_show_a_token_its_own_past(rows: list[list[int]]) -> None:
    tree = line_up(arrays(rows))
    assert tree.token_ids.tolist() == [token for row in rows for token in row]
    assert shows_each_token_its_own_past(tree, rows)


@given(sequences, st.integers(1, 20))
def test_split_trees_fit_the_budget_unless_one_sequence_alone_does_not(rows: list[list[int]], budget: int) -> None:
    parts = split_by_budget(arrays(rows), budget)
    assert sorted(i for part, _ in parts for i in part) == list(range(len(rows)))
    for part, size in parts:
        assert size == len(build_tree(arrays([rows[i] for i in part])))
        assert len(part) == 1 or size <= budget


@given(sequences, st.integers(1, 20))
def test_a_part_ends_only_where_the_next_sequence_does_not_fit(rows: list[list[int]], budget: int) -> None:
    """Sorted, so that those that share a prefix come together."""
    parts = [part for part, _ in split_by_budget(arrays(rows), budget)]
    in_order = [rows[i] for part in parts for i in part]
    assert in_order == sorted(rows)
    for part, following in pairwise(parts):
        assert len(build_tree(arrays([rows[i] for i in [*part, following[0]]]))) > budget


def test_no_sequences_are_split_into_no_parts() -> None:
    assert split_by_budget([], 10) == []


@given(sizes, st.integers(1, 5))
def test_balance_places_everything_within_one_item_of_even(items: list[int], bins: int) -> None:
    placed = balance(items, bins)
    assert sorted(i for part in placed for i in part) == list(range(len(items)))
    loads = [sum(items[i] for i in part) for part in placed]
    assert max(loads) - min(loads) <= max(items)


def test_balance_places_the_largest_first() -> None:
    assert balance([1, 1, 2], 2) == [[2], [0, 1]]
    assert balance([3, 1, 3, 2], 2) == [[0, 3], [2, 1]]


@given(sizes, st.integers(1, 60))
def test_parts_are_within_the_budget_or_one_larger_item(items: list[int], budget: int) -> None:
    parts = pack(items, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(items)))
    assert all(len(part) == 1 or sum(items[i] for i in part) <= budget for part in parts)


@pytest.mark.parametrize(
    ("items", "budget", "parts"),
    [([3, 2, 5], 8, [[2, 0], [1]]), ([5, 3, 2, 2], 6, [[0], [1, 2], [3]]), ([9, 1], 5, [[0], [1]])],
)
def test_first_fit_decreasing(items: list[int], budget: int, parts: list[list[int]]) -> None:
    assert pack(items, budget) == parts
