"""An engine's rows of experts: which are read, which count as missing, which are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.domain.experts.routed_experts import RoutedExperts, RouteOrigin, RoutingShape, mark_recomputed

SHAPE = RoutingShape(layers=3, top_k=2, experts=5)


def raw(ids) -> bytes:
    return np.array(ids, "<i4").tobytes()


@given(st.lists(st.lists(st.permutations(range(5)), min_size=3, max_size=3), max_size=20))
def test_rows_are_read_as_sets_in_ascending_order(rows) -> None:
    chosen = [[layer[:2] for layer in row] for row in rows]
    found = RoutedExperts.parse(raw(chosen), SHAPE)
    assert found.ids.shape == (len(rows), 3, 2)
    assert found.ids.tolist() == [[sorted(layer) for layer in row] for row in chosen]
    assert (found.origins == RouteOrigin.RECORDED).all()


def test_a_row_that_was_not_captured_is_missing() -> None:
    """The first layer has no experts: the engine reports zeros for it at every position."""
    whole, nothing, half = [[0, 0], [3, 1], [0, 4]], [[0, 0], [0, 0], [0, 0]], [[0, 0], [2, 2], [0, 1]]
    found = RoutedExperts.parse(raw([whole, nothing, half]), SHAPE)
    assert found.origins.tolist() == [RouteOrigin.RECORDED, RouteOrigin.MISSING, RouteOrigin.MISSING]
    assert found.ids.tolist() == [[[0, 0], [1, 3], [0, 4]], nothing, nothing]
    assert RoutedExperts.parse(raw([nothing, nothing]), SHAPE).counts() == {
        RouteOrigin.MISSING: 2,
        RouteOrigin.RECORDED: 0,
        RouteOrigin.RECOMPUTED: 0,
    }


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"abc", "3 bytes are no rows"),
        (raw([0] * 7), "28 bytes are no rows"),
        (raw([0, 1, 2, 3, 4, 5]), "experts 0 to 5 are not among the model's 5"),
        (raw([0, 1, 2, 3, 4, -1]), "experts -1 to 4"),
    ],
)
def test_other_bytes_are_refused(sent, words) -> None:
    with pytest.raises(ValueError, match=words):
        RoutedExperts.parse(sent, SHAPE)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 5}, SHAPE),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_local_experts": 5}, SHAPE),
        ({"text_config": {"num_hidden_layers": 3, "num_experts_per_tok": 2, "n_routed_experts": 5}}, SHAPE),
        ({"num_hidden_layers": 3}, None),
        ({"num_hidden_layers": 3, "num_experts_per_tok": 2, "num_experts": 0}, None),
    ],
)
def test_the_shape_is_read_from_a_model_s_configuration(config, shape) -> None:
    assert RoutingShape.of(config) == shape


def test_sizes_that_cannot_be_recorded_are_refused() -> None:
    with pytest.raises(ValueError, match="6 of 5 experts in 3 layers"):
        RoutingShape.of({"num_hidden_layers": 3, "num_experts_per_tok": 6, "num_experts": 5})


def test_only_recorded_positions_become_recomputed() -> None:
    origins = np.array([0, 1, 2, 1], np.uint8)
    mark_recomputed(origins[:3])
    assert origins.tolist() == [0, 2, 2, 1]
