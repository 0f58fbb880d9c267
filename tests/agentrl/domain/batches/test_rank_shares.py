"""Every trajectory has one rank, ranks have about as much to compute, and minibatches do not depend on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.batches.outline import Outline
from agentrl.domain.batches.rank_shares import CHUNKS, cut_outlines, group_tokens, minibatches_of, ranks_of

lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 400), st.booleans()), min_size=1, max_size=60)


def outline(group: int, name: int, tokens: int, *, trains: bool = True, prompt: int = 10) -> Outline:
    """One call whose prompt all of its group share."""
    rows = np.array([[0, 0, prompt, prompt + tokens]], np.int32)
    return Outline(
        trajectory_id=f"{group}-{name}",
        session_id=f"{group}-{name}",
        episode_id=f"{group}-{name}",
        group_id=f"g{group}",
        calls=(f"call-{group}-{name}",),
        prompts=(f"prompt-{group}",),
        outputs=rows[:, 2:],
        temperatures=np.ones(1, np.float32),
        kv_mixed=np.zeros(1, np.bool_),
        sampled=rows,
        trained=rows if trains else rows[:0],
        turn_returns=np.zeros(1),
        episode_return=0.0,
        wasted_tokens=0,
    )


def batch_of(rows: Sequence[tuple[int, int, bool]]) -> list[Outline]:
    return [outline(group, i, tokens, trains=trains) for i, (group, tokens, trains) in enumerate(rows)]


def loads(batch: Sequence[Outline], found: Sequence[int], ranks: int) -> list[int]:
    return [sum(one.computed_tokens for one, r in zip(batch, found, strict=True) if r == rank) for rank in range(ranks)]


@given(lengths, st.integers(1, 5), st.integers(1, 3), st.integers(1, 1000))
def test_every_trajectory_has_one_rank(
    rows: list[tuple[int, int, bool]], ranks: int, minibatches: int, budget: int
) -> None:
    batch = batch_of(rows)
    teaching = {one.group_id for one in batch if int(one.group_id[1:]) % 2}
    found = ranks_of(batch, cut_outlines(batch), teaching, ranks=ranks, minibatches=minibatches, budget=budget)
    assert len(found) == len(batch)
    assert set(found) <= set(range(ranks))


def test_ranks_have_about_the_same_to_compute() -> None:
    rng = np.random.default_rng(0)
    batch = [outline(g, k, int(rng.integers(50, 4000))) for g in range(32) for k in range(8)]
    found = ranks_of(batch, cut_outlines(batch), set(group_tokens(batch)), ranks=4, minibatches=1, budget=1)
    of_ranks = loads(batch, found, 4)
    assert max(of_ranks) < 1.05 * np.mean(of_ranks)
    whole = [len({found[i] for i in range(g * 8, g * 8 + 8)}) for g in range(32)]
    assert np.mean(whole) < 3  # most of a group is on one rank or two


def test_few_groups_are_cut_so_that_no_rank_is_idle() -> None:
    batch = [outline(0, k, 1000) for k in range(16)]
    found = ranks_of(batch, cut_outlines(batch), {"g0"}, ranks=4, minibatches=1, budget=100)
    assert sorted(loads(batch, found, 4)) == [4 * 1009] * 4
    assert CHUNKS > 4


def test_a_chunk_counts_a_shared_prompt_once() -> None:
    batch = [outline(0, k, 5, prompt=100) for k in range(4)]
    assert [size for _, size in cut_outlines(batch)(range(4), 10_000)] == [100 + 4 * 4 + 0]
    assert [len(part) for part, _ in cut_outlines(batch)(range(4), 108)] == [2, 2]


def test_minibatches_are_of_whole_groups_and_empty_ones_are_left_out() -> None:
    assert minibatches_of({"a": 5, "b": 3, "c": 2}, 2) == [["a"], ["b", "c"]]
    assert minibatches_of({"a": 5}, 3) == [["a"]]
    assert minibatches_of({}, 2) == []
