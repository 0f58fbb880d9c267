"""Experts survive packing, and take less room than their bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.experts.routed_experts import RoutedExperts
from agentrl.store.db import codec, experts_codec


def random_experts(rows: int, layers: int, top_k: int, experts: int, seed: int) -> RoutedExperts:
    rng = np.random.default_rng(seed)
    kind = np.uint8 if experts <= 256 else np.uint16
    ids = np.sort(np.argsort(rng.random((rows, layers, experts)), 2)[..., :top_k], 2).astype(kind)
    return RoutedExperts(ids, rng.integers(0, 3, rows).astype(np.uint8))


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 9), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_experts_survive_packing(rows, layers, top_k, more, seed) -> None:
    experts = random_experts(rows, layers, top_k, top_k + more, seed)
    found = experts_codec.unpack(experts_codec.pack(experts))
    assert found.ids.dtype == experts.ids.dtype
    np.testing.assert_array_equal(found.ids, experts.ids)
    np.testing.assert_array_equal(found.origins, experts.origins)


def test_a_set_takes_three_quarters_of_the_room_of_its_bytes() -> None:
    """8 of 128 experts, drawn evenly: no choice of a model is harder to pack."""
    experts = random_experts(500, 48, 8, 128, 0)
    assert len(experts_codec.pack(experts)) < 0.75 * experts.ids.nbytes


def test_other_bytes_are_refused() -> None:
    blob = experts_codec.pack(random_experts(3, 2, 2, 4, 0))
    with pytest.raises(ValueError, match="are no experts of 2 layers with 2 each"):
        experts_codec.unpack(codec.compress(codec.decompress(blob) + b"x"))
