"""Bounded in bytes, and emptied by what trains."""

from __future__ import annotations

import numpy as np

from agentrl.domain.batches.outline import PathTokens
from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.trainer.batches.token_cache import TokenCache


def tokens(count: int, experts: int = 0) -> PathTokens:
    routed = RoutedExperts.missing(count, 1, experts) if experts else None
    return PathTokens(np.zeros(count, np.int32), np.zeros(count, np.float32), np.zeros((1, 2), np.int32), routed)


def test_what_does_not_fit_is_not_kept() -> None:
    cache = TokenCache(100)
    assert cache.add("a", tokens(10))
    assert not cache.add("b", tokens(10))
    assert (cache.size_bytes, "a" in cache, "b" in cache) == (80, True, False)
    assert cache.add("a", tokens(10))
    assert cache.size_bytes == 80
    assert cache.take("a") is not None
    assert cache.take("a") is None
    assert cache.size_bytes == 0
    assert cache.add("b", tokens(10))


def test_experts_count() -> None:
    assert tokens(10, experts=4).size_bytes == 80 + 40 + 10


def test_a_new_guess_drops_the_others() -> None:
    cache = TokenCache(1000)
    for name in "abc":
        cache.add(name, tokens(1))
    cache.keep_only(["b", "d"])
    assert ["a" in cache, "b" in cache, "c" in cache] == [False, True, False]
    assert cache.size_bytes == 8
