"""The pieces of a forest are its attention: every visible pair once, no other pair, few masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentrl.domain.batching import PrefixTree, build_tree
from agentrl.trainer.attention.pieces import Chain, Piece, chains, pieces, visible, windowed

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def forest(lists: list[list[int]]) -> PrefixTree:
    return build_tree([np.array(ids, np.int32) for ids in lists])


def covered(found: list[Piece], tree: PrefixTree, window: int | None) -> NDArray[np.int64]:
    """(N, N) in how many pieces each pair is."""
    count = np.zeros((len(tree), len(tree)), np.int64)
    sees = visible(tree.ends, tree.positions, window)
    for p in found:
        part: Any = np.s_[p.query : p.query_stop, p.key : p.key_stop]
        shown = np.ones_like(count[part])
        if p.causal:
            assert (p.query, p.query_stop) == (p.key, p.key_stop)
            shown = np.tril(shown)
        elif p.masked:
            shown = sees[part].astype(np.int64)
        count[part] += shown
    return count


@given(sequences, st.integers(0, 20), st.none() | st.integers(1, 14), st.integers(1, 9))
def test_each_visible_pair_is_in_one_piece(lists: list[list[int]], small: int, window: int | None, tile: int) -> None:
    tree = forest(lists)
    found = pieces(chains(tree.ends), small)
    if window is not None:
        found = windowed(found, tree.positions, window, tile)
    assert (covered(found, tree, window) == visible(tree.ends, tree.positions, window)).all()


@given(sequences, st.integers(0, 20), st.none() | st.integers(1, 14))
def test_a_tokens_own_piece_comes_first(lists: list[list[int]], small: int, window: int | None) -> None:
    tree = forest(lists)
    found = pieces(chains(tree.ends), small)
    if window is not None:
        found = windowed(found, tree.positions, window, tile=4)
    own = [p for p in found if p.query == p.key]
    assert found[: len(own)] == own
    assert sorted(i for p in own for i in range(p.query, p.query_stop)) == list(range(len(tree)))


@given(sequences)
def test_chains_tile_the_forest_and_follow_their_parents(lists: list[list[int]]) -> None:
    tree = forest(lists)
    found = chains(tree.ends)
    assert [c.start for c in found[1:]] + [len(tree)] == [c.stop for c in found]
    for chain in found:
        assert (np.diff(tree.positions[chain.start : chain.stop]) == 1).all()
        before = tree.positions[found[chain.parent].stop - 1] if chain.parent >= 0 else -1
        assert tree.positions[chain.start] == before + 1


def test_a_prompt_with_two_answers() -> None:
    tree = forest([[1, 2, 3, 4], [1, 2, 5]])
    assert chains(tree.ends) == [Chain(0, 2, 5, -1), Chain(2, 4, 4, 0), Chain(4, 5, 5, 0)]
    assert pieces(chains(tree.ends), small=0) == [
        Piece(0, 2, 0, 2, causal=True),
        Piece(2, 4, 2, 4, causal=True),
        Piece(4, 5, 4, 5, causal=True),
        Piece(2, 5, 0, 2),
    ]
    assert pieces(chains(tree.ends), small=3) == [
        Piece(0, 2, 0, 2, causal=True),
        Piece(2, 5, 2, 5, masked=True),
        Piece(2, 5, 0, 2),
    ]


@pytest.mark.parametrize("tokens", [8192, 32768])
def test_masks_grow_linearly_with_the_tokens(tokens: int) -> None:
    """A prompt of half the tokens, and branches of 100 to 1,500."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, tokens // 2)
    lists, left = [], tokens // 2
    while left > 0:
        size = min(left, int(rng.integers(100, 1500)))
        lists.append(np.concatenate([prompt, rng.integers(0, 10**6, size)]).astype(np.int32))
        left -= size
    tree = build_tree(lists)
    whole = pieces(chains(tree.ends))
    for found in (whole, windowed(whole, tree.positions, 1024)):
        masked = [(p.query_stop - p.query) * (p.key_stop - p.key) for p in found if p.masked]
        assert sum(masked) * 4 <= 4096 * tokens
        assert max(masked, default=0) <= 512 * 512
