"""Layers as a pattern, and folders with a shape and no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ModelFolderError
from agentrl.trainer.models import loading
from agentrl.trainer.planning.layer_extrapolation import edges, samples
from agentrl.trainer.planning.model_shapes import SHAPES
from agentrl.trainer.planning.shape_folder import Layers, layers_of, on_meta, pattern, with_layers, write_shape

BILLIONS = {"Qwen3-8B": 8.19, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235.1, "1T-mixture": 1026}


@given(
    beginning=st.lists(st.sampled_from("abc"), max_size=3),
    period=st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    times=st.integers(1, 8),
)
def test_a_pattern_describes_the_layers(beginning: list[str], period: list[str], times: int) -> None:
    kinds = beginning + period * times
    found = pattern(kinds)
    repeated = kinds[found.beginning : found.beginning + found.period]
    assert kinds[: found.beginning] + repeated * found.times == kinds
    assert found.beginning + found.period <= len(beginning) + len(period)


@given(beginning=st.integers(0, 4), period=st.integers(1, 6), times=st.integers(1, 100))
def test_the_traced_models_differ_by_one_repetition_and_have_all_edges(beginning: int, period: int, times: int) -> None:
    layers = Layers(beginning, period, times)
    first, second = samples(layers)
    if first != second:
        assert second.times == first.times + 1 < times
        assert first.count >= sum(edges(layers))


@pytest.mark.parametrize("model", BILLIONS)
def test_the_known_shapes_have_the_published_numbers_of_parameters(model: str) -> None:
    assert sum(p.numel() for p in on_meta(SHAPES[model]).parameters()) / 1e9 == pytest.approx(BILLIONS[model], rel=2e-3)


def test_a_beginning_of_dense_layers_is_found() -> None:
    assert layers_of(SHAPES["1T-mixture"]) == Layers(1, 1, 60)


def test_a_folder_without_weights_loads_and_takes_no_room(tmp_path: Path) -> None:
    shape = with_layers(SHAPES["Qwen3-8B"], Layers(0, 1, 2))
    folder = write_shape(tmp_path / "shape", shape)
    lm, names = loading.build(folder)
    assert lm.config.num_hidden_layers == 2
    assert set(names.plain) == {name for name, _ in lm.named_parameters()}
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < 2**20
    assert sum(file.stat().st_size for file in folder.iterdir()) > 10**9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model_type"),
        ({"model_type": "qwen4"}, "cannot make"),
        (SHAPES["Qwen3-8B"] | {"num_hidden_layers": 10**6}, "1000"),
    ],
)
def test_other_configurations_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        on_meta(config)
