"""Sharing a microbatch's tokens over ranks changes nothing: against attention over all of its tokens, in float64."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.errors import UserError
from agentrl.trainer.parallel.context_parallel import Share, check
from agentrl.trainer.parallel.head_split import HeadSplit

GROUPED = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(lambda sizes: (sizes[0] * sizes[1], sizes[0]))
"""Numbers of query heads and of key/value heads."""


@given(GROUPED, st.integers(1, 9))
def test_every_rank_gets_whole_groups_of_heads(heads: tuple[int, int], ranks: int) -> None:
    queries, keys = heads
    split = HeadSplit.of(queries, keys, ranks)
    assert split.queries % ranks == split.keys % ranks == split.queries % split.keys == 0
    assert split.keys >= keys * split.copies
    assert split.group * split.copies == queries // keys  # so that a query head keeps its key/value head
    size = queries // keys
    assert split.queries // ranks == min(-(-keys * c // ranks) * (size // c) for c in divisors(size))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "expected"),
    [
        (32, 8, 8, (32, 8, 1)),
        (32, 4, 8, (32, 8, 2)),  # copies, no zeros
        (9, 3, 2, (10, 10, 3)),  # 5 heads a rank; with whole groups of three it would be 6
        (16, 2, 4, (16, 4, 2)),
    ],
)
def test_known_splits(queries: int, keys: int, ranks: int, expected: tuple[int, int, int]) -> None:
    split = HeadSplit.of(queries, keys, ranks)
    assert (split.queries, split.keys, split.copies) == expected


class Meeting:
    """Ranks of one process, as threads, that exchange rows; a gradient crosses it."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=20)
        self.given: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, rows: Tensor) -> Tensor:
        self.given[rank] = rows
        self.barrier.wait()
        got = torch.stack([theirs[rank] for theirs in self.given])
        self.barrier.wait()
        return got


class Threaded(Share):
    """A share whose exchange is between threads."""

    __slots__ = ("meeting",)

    def __init__(self, rank: int, ranks: int, tokens: int, meeting: Meeting) -> None:
        mesh: Any = SimpleNamespace(get_group=lambda: None, get_local_rank=lambda: rank, size=lambda: ranks)
        super().__init__(mesh, tokens)
        self.meeting = meeting

    def _exchanged(self, x_WX: Tensor) -> Tensor:
        return self.meeting.exchange(self.rank, x_WX)


def attend(mask_NN: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks_h: Tensor | None) -> Tensor:
    """(1, h, N, d), with a sink that scales a head's output."""
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask_NN, enable_gqa=True)
    return out if sinks_h is None else out * sinks_h[:, None, None]


@settings(max_examples=25, deadline=None)
@given(GROUPED, st.integers(1, 5), st.integers(1, 17), st.booleans(), st.integers(0, 99))
def test_attention_with_shares_is_attention(
    heads: tuple[int, int], ranks: int, tokens: int, sinks: bool, seed: int
) -> None:
    """Outputs and gradients."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys = heads
    made = [torch.randn(1, h, tokens, d, generator=generator).double() for h, d in ((queries, 4), (keys, 4), (keys, 3))]
    sinks_h = torch.rand(queries, generator=generator).double() if sinks else None
    weights = torch.randn(1, tokens, queries, 3, generator=generator).double()
    mask_NN = (torch.rand(tokens, tokens, generator=generator) < 0.7) | torch.eye(tokens, dtype=torch.bool)
    function: Any = partial(attend, mask_NN)

    def run(rank: int, qkv: list[Tensor], into: list[Tensor], meeting: Meeting) -> None:
        share = Threaded(rank, ranks, tokens, meeting)
        own = []
        for x in qkv:
            shared = x.new_zeros(1, x.shape[1], share.length, x.shape[3])
            own.append(shared.index_add(2, torch.arange(share.held), x[:, :, share.first : share.first + share.held]))
        into[rank] = share.attend(function, own[0], own[1], own[2], sinks_h)[:, : share.held]

    expected = [x.clone().requires_grad_() for x in made]
    (function(*expected, sinks_h).transpose(1, 2) * weights).sum().backward()
    found = [x.clone().requires_grad_() for x in made]
    outputs: list[Tensor] = [torch.empty(0)] * ranks
    meeting = Meeting(ranks)
    threads = [threading.Thread(target=run, args=(rank, found, outputs, meeting)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = torch.cat(outputs, 1)
    torch.testing.assert_close(joined, function(*expected, sinks_h).transpose(1, 2), rtol=0, atol=1e-12)
    (joined * weights).sum().backward()
    for x, other in zip(found, expected, strict=True):
        torch.testing.assert_close(x.grad, other.grad, rtol=0, atol=1e-12)


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_token_is_in_one_share(tokens: int, ranks: int) -> None:
    x_N2 = torch.arange(1, 2 * tokens + 1).view(tokens, 2)
    shares = [Threaded(rank, ranks, tokens, Meeting(1)) for rank in range(ranks)]
    assert len({len(share.take(x_N2)) for share in shares}) == 1
    assert torch.equal(torch.cat([share.take(x_N2)[: share.held] for share in shares]), x_N2)
    assert all(not share.take(x_N2)[share.held :].any() for share in shares)


def test_models_that_cannot_be_shared_are_named() -> None:
    config = SimpleNamespace(num_attention_heads=8)
    config.get_text_config = lambda: config
    check(config, "", 4, 2)
    with pytest.raises(UserError, match="context 8 is more than the 4 heads to divide; 4 would do"):
        check(config, "", 8, 2)
    with pytest.raises(
        UserError, match="cannot divide this model's sequences: it has convolutions over tokens; it must be 1"
    ):
        check(config, "it has convolutions over tokens", 2, 1)
