"""The memory of a chunk's logits is bounded, whatever the vocabulary. Chunks give the exact numbers: test_losses.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.models.head import CHUNK, LOGITS_BYTES, chunk_of


@given(st.integers(1, 10**9))
def test_a_chunk_is_as_large_as_its_bytes_allow(vocabulary: int) -> None:
    chunk, bytes_of_one = chunk_of(vocabulary), 4 * vocabulary
    assert 1 <= chunk <= CHUNK
    assert chunk == 1 or chunk * bytes_of_one <= LOGITS_BYTES
    assert chunk == CHUNK or (chunk + 1) * bytes_of_one > LOGITS_BYTES


@pytest.mark.parametrize(("vocabulary", "chunk"), [(151_936, 256), (262_144, 256), (1_000_000, 67)])
def test_known_vocabularies(vocabulary: int, chunk: int) -> None:
    assert chunk_of(vocabulary) == chunk
