"""A packed forest has the loss and the gradients of its paths, each computed by transformers alone, in float64."""

from __future__ import annotations

import pytest
from forests.exactness import compare
from forests.passes import measured
from forests.shape import branching


@pytest.mark.parametrize(
    "tokens", [1024, pytest.param(8192, marks=pytest.mark.long), pytest.param(32768, marks=pytest.mark.long)]
)
def test_a_long_forest_has_the_loss_and_gradients_of_its_paths(tokens: int) -> None:
    assert max(compare(branching(tokens)).values()) < 1e-6


@pytest.mark.long
def test_memory_is_that_of_the_same_tokens_one_by_one_and_grows_linearly() -> None:
    packed = {tokens: measured("packed", tokens)["bytes"] for tokens in (8192, 32768)}
    assert packed[32768] <= 1.3 * measured("alone", 32768)["bytes"]
    assert packed[32768] <= 1.1 * 4 * packed[8192]
