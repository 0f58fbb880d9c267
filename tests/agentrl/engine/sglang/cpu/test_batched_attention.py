"""Attention over a paged cache, compared with SGLang's own and with the definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.engine.sglang.cpu.batched_attention import attend_last, attend_new, decode_groups, extensions

KV_HEADS, SIZE, CACHE_ROWS = 2, 8, 512
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=6)
WINDOWS = st.none() | st.integers(0, 40)


@dataclass(frozen=True)
class Paged:
    """Keys and values of some requests in a cache, whose unused rows are not numbers."""

    keys: Tensor
    values: Tensor
    rows: Tensor  # a line for each place
    places: Tensor

    def of(self, request: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one request, (T, K, D)."""
        own = self.rows[self.places[request], :length].long()
        return self.keys[own], self.values[own]


def paged(lengths: list[int], seed: int = 0) -> Paged:
    rng = torch.Generator().manual_seed(seed)
    free = (torch.randperm(CACHE_ROWS - 1, generator=rng) + 1).tolist()
    keys, values = torch.full((2, CACHE_ROWS, KV_HEADS, SIZE), torch.nan)
    keys[0] = values[0] = 0.0  # as SGLang's padding
    places = torch.randperm(len(lengths) + 2, generator=rng)[: len(lengths)]
    rows = torch.full((len(lengths) + 2, 100), CACHE_ROWS - 1, dtype=torch.int32)  # a row of another request
    for place, length in zip(places.tolist(), lengths, strict=True):
        own, free = free[:length], free[length:]
        rows[place, :length] = torch.tensor(own, dtype=torch.int32)
        keys[own] = torch.randn(length, KV_HEADS, SIZE, generator=rng)
        values[own] = torch.randn(length, KV_HEADS, SIZE, generator=rng)
    return Paged(keys, values, rows, places)


def attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """The definition, in float64: queries (N, H, D) are the last N of T positions."""
    n, heads, _ = query.shape
    repeated = [tensor.double().repeat_interleave(heads // KV_HEADS, dim=1) for tensor in (keys, values)]
    scores = torch.einsum("nhd,thd->hnt", query.double(), repeated[0]) * scale
    at, to = torch.arange(len(keys) - n, len(keys))[:, None], torch.arange(len(keys))
    hidden = (to > at) if window is None else (to > at) | (to < at - window)
    return torch.einsum("hnt,thd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), repeated[1])


@given(LENGTHS, st.integers(1, 3), WINDOWS, st.integers(0, 99))
def test_last_tokens_attend_to_their_own_requests(
    lengths: list[int], per_kv: int, window: int | None, seed: int
) -> None:
    cache = paged(lengths, seed)
    query = torch.randn(len(lengths), KV_HEADS * per_kv, SIZE)
    output = torch.full_like(query, torch.nan)
    groups = decode_groups(cache.rows, cache.places, lengths)
    attend_last(query, output, cache.keys, cache.values, groups, scale=0.3, window=window)
    for request, length in enumerate(lengths):
        expected = attention(query[request : request + 1], *cache.of(request, length), 0.3, window)
        torch.testing.assert_close(output[request : request + 1].double(), expected, atol=1e-6, rtol=1e-5)


@given(LENGTHS, st.integers(1, 3), WINDOWS, st.data())
def test_new_tokens_attend_to_their_prefix_and_themselves(
    lengths: list[int], per_kv: int, window: int | None, data: st.DataObject
) -> None:
    cache = paged(lengths)
    new = [data.draw(st.integers(1, length)) for length in lengths]
    prefixes = [length - n for length, n in zip(lengths, new, strict=True)]
    query = torch.randn(sum(new), KV_HEADS * per_kv, SIZE)
    output = torch.full_like(query, torch.nan)
    plans = extensions(cache.rows, cache.places, prefixes, new)
    attend_new(query, output, cache.keys, cache.values, plans, scale=0.3, window=window)
    for request, plan in enumerate(plans):
        found, own = output[plan.begin : plan.end], query[plan.begin : plan.end]
        expected = attention(own, *cache.of(request, lengths[request]), 0.3, window)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 7])
def test_results_are_those_of_sglang(window: int | None) -> None:
    from agentrl.engine.sglang.cpu.attention_backend import BatchedAttention

    lengths, new = [40, 3, 70], [5, 3, 1]
    cache, backend = paged(lengths), stockless(BatchedAttention)
    lens, new_lens = torch.tensor(lengths), torch.tensor(new)
    stock = super(BatchedAttention, backend)
    where: list[Any] = [cache.keys, cache.values, cache.rows, cache.places, lens]
    options = {"scaling": 0.3, "enable_gqa": True, "sliding_window_size": window}
    query = torch.randn(sum(new), 2 * KV_HEADS, SIZE)
    extend = [*where, lens - new_lens, new_lens]
    expected = stock._run_sdpa_forward_extend(query, torch.empty_like(query), *extend, causal=True, **options)
    found = backend._run_sdpa_forward_extend(query, torch.empty_like(query), *extend, causal=True, **options)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    last = query[:3]
    expected = stock._run_sdpa_forward_decode(last, torch.empty_like(last), *where, **options)
    found = backend._run_sdpa_forward_decode(last, torch.empty_like(last), *where, **options)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def stockless(kind: Any) -> Any:
    """A backend without a model runner."""
    backend = kind.__new__(kind)
    backend._groups = backend._extensions = None
    backend.use_sliding_window_kv_pool = False
    return backend


def test_requests_of_unlike_length_are_divided() -> None:
    lengths = [10, 400, 60, 410, 90, 300]
    rows = torch.zeros((6, 512), dtype=torch.int32)
    groups = decode_groups(rows, torch.arange(6), lengths)
    assert [group.requests_B.tolist() for group in groups] == [[0, 2], [4], [1, 3, 5]]
    assert [group.rows_BT.shape[1] for group in groups] == [60, 90, 410]
