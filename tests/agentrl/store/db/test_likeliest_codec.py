"""The likeliest tokens of an output survive packing, and take less room than as JSON."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.store.db import codec, likeliest_codec

PAIRS = st.tuples(st.floats(width=32, max_value=0, allow_nan=False), st.integers(0, 2**31 - 1))
ROWS = st.lists(st.lists(PAIRS, max_size=20), max_size=30)


@given(ROWS)
def test_rows_survive_packing_bit_for_bit(rows) -> None:
    found = likeliest_codec.unpack(likeliest_codec.pack(rows))
    assert found.rows == rows
    assert found.ids.shape == found.logprobs.shape == (len(rows), max([1, *map(len, rows)]))


@given(st.lists(st.lists(PAIRS.filter(lambda pair: np.isfinite(pair[0])), min_size=1, max_size=20), max_size=30))
def test_rows_that_older_versions_packed_as_json_are_read(rows) -> None:
    assert likeliest_codec.unpack(codec.pack_json(rows)).rows == rows


def test_they_take_half_the_room_that_json_takes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (300, 4000)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    best = np.argsort(-logprobs, 1)[:, :20]
    values = np.take_along_axis(logprobs, best, 1)
    rows = [list(zip(*row, strict=True)) for row in zip(values.tolist(), best.tolist(), strict=True)]
    assert len(likeliest_codec.pack(rows)) < 0.55 * len(codec.pack_json(rows))
