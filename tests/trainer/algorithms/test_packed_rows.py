"""Sums behind each token of a row, against a loop over the tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.algorithms.packed_rows import LONGEST_BLOCK, Rows, suffix_sums

row_lengths = st.lists(st.integers(0, 3 * LONGEST_BLOCK + 1), max_size=8)


def token_by_token(values: list[float], rows: list[int], decay: float) -> list[float]:
    out = list(values)
    for t in reversed(range(len(out) - 1)):
        if rows[t] == rows[t + 1]:
            out[t] += decay * out[t + 1]
    return out


@given(row_lengths, st.sampled_from([0.0, 0.3, 0.95, 0.999, 1.0]), st.integers(0, 2**32 - 1))
def test_suffix_sums_equal_those_of_a_loop(lengths: list[int], decay: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    of_S = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    values_S = torch.from_numpy(rng.normal(0, 1, len(of_S)) * 10.0 ** rng.integers(-3, 4))
    found_S = suffix_sums(values_S, Rows(of_S, len(lengths)), decay)
    expected = torch.tensor(token_by_token(values_S.tolist(), of_S.tolist(), decay), dtype=torch.float64)
    largest = max(1.0, float(values_S.abs().max())) if len(values_S) else 1.0
    torch.testing.assert_close(found_S, expected, rtol=1e-12, atol=1e-12 * largest)


def test_a_row_of_many_blocks_adds_up_what_is_behind() -> None:
    lengths = [100 * LONGEST_BLOCK + 7, 1, 64 * LONGEST_BLOCK]
    of_S = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    found_S = suffix_sums(torch.ones(len(of_S), dtype=torch.float64), Rows(of_S, 3), 1.0)
    assert found_S.tolist() == [float(n) for length in lengths for n in range(length, 0, -1)]
