"""Runs and lines are the forest: each token after exactly its ancestors, from states that exist by then."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.domain.batching import PrefixTree, build_tree
from agentrl.trainer.attention.pieces import Chain, chains
from agentrl.trainer.recurrence.state_runs import FEWEST, NO_STATE, PADDED, line, places, runs

sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)
NESTED = [[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 1], [0, 2, 2], [0, 2, 1, 1, 1, 1, 1]]
"""Chains of one token that follow one another."""


def forest(lists: list[list[int]]) -> PrefixTree:
    return build_tree([np.array(ids, np.int32) for ids in lists])


def ancestors(tree: PrefixTree, token: int) -> list[int]:
    """The path to a token, by definition."""
    return [i for i in range(token + 1) if i <= token < tree.ends[i]]


@given(sequences)
@example(NESTED)
def test_each_sequence_continues_the_state_that_it_starts_from(lists: list[list[int]]) -> None:
    tree = forest(lists)
    cut = chains(tree.ends)
    kept: dict[int, list[int]] = {}  # chain → the path that its state results from
    for run in runs(cut):
        assert len({before == NO_STATE for before in run.before}) == 1
        for row, before in zip(run.tokens_RL.tolist(), run.before, strict=True):
            tokens = row[: row.index(row[-1]) + 1]  # without padding
            path = kept[before] + tokens if before != NO_STATE else tokens
            assert path == ancestors(tree, path[-1])
        if run.after != NO_STATE:
            assert len(run.before) == 1
            assert path[-1] == cut[run.after].stop - 1
            kept[run.after] = path


@given(sequences)
@example(NESTED)
def test_every_token_has_an_output(lists: list[list[int]]) -> None:
    tree = forest(lists)
    found = runs(chains(tree.ends))
    outputs = np.concatenate([run.tokens_RL.reshape(-1) for run in found])
    assert (outputs[places(found, len(tree))] == np.arange(len(tree))).all()


@given(sequences)
@example(NESTED)
def test_a_run_from_a_state_is_long_enough_and_little_of_a_run_is_padding(lists: list[list[int]]) -> None:
    for run in runs(chains(forest(lists).ends)):
        longest = run.tokens_RL.shape[1]
        if run.starts_from_states:
            assert longest >= FEWEST
        shortest = min(row.index(row[-1]) + 1 for row in run.tokens_RL.tolist())
        assert longest <= max(FEWEST, PADDED * shortest)


@given(sequences, st.integers(1, 5))
@example(NESTED, 4)
def test_in_a_line_each_token_follows_its_last_ancestors(lists: list[list[int]], kernel: int) -> None:
    tree = forest(lists)
    made = line(chains(tree.ends), kernel)
    for token, place in enumerate(made.places_N.tolist()):
        seen = slice(place - kernel + 1, place + 1)
        tokens, given_K = made.tokens_E[seen], made.given_E[seen]
        assert len(tokens) == kernel
        assert tokens[given_K].tolist() == ancestors(tree, token)[-kernel:]
        assert given_K.tolist() == sorted(given_K.tolist())  # absent ones come first
    assert len(made.tokens_E) == len(tree) + (kernel - 1) * len(chains(tree.ends))


def test_a_prompt_with_two_answers() -> None:
    tree = forest([[1, 2, 3, 4], [1, 2, 5]])
    prompt, answers = runs(chains(tree.ends))
    assert (prompt.tokens_RL.tolist(), prompt.before, prompt.after) == ([[0, 1]], (NO_STATE,), 0)
    assert (answers.tokens_RL.tolist(), answers.before) == ([[2, 3], [4, 4]], (0, 0))
    assert line(chains(tree.ends), 3).tokens_E.tolist() == [0, 0, 0, 1, 0, 1, 2, 3, 0, 1, 4]


def test_a_token_that_two_of_three_answers_share_is_computed_with_each() -> None:
    cut = chains(forest([[1, 2, 3, 3, 3], [1, 2, 3, 4, 4], [1, 2, 5, 5]]).ends)
    assert Chain(2, 3, 7, 0) in cut
    assert [(run.tokens_RL.tolist(), run.before) for run in runs(cut)] == [
        ([[0, 1]], (NO_STATE,)),
        ([[2, 3, 4], [2, 5, 6], [7, 8, 8]], (0, 0, 0)),
    ]
