"""Key/value cache of engines: bytes of a token, and how many fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.planning.engine_memory import RESERVE, cached_bytes, engine_memory, least_tensor
from agentrl.trainer.planning.model_shapes import SHAPES

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "tensor", "dtype", "expected"),
    [
        ("Qwen3-8B", 1, "bfloat16", 36 * 2 * 8 * 128 * 2),  # 144 KiB
        ("Qwen3-8B", 4, "bfloat16", 36 * 2 * 2 * 128 * 2),
        ("Qwen3-8B", 16, "bfloat16", 36 * 2 * 1 * 128 * 2),  # a head is not split
        ("Qwen3-8B", 1, "fp8_e4m3", 36 * 2 * 8 * 128),
        ("1T-mixture", 1, "bfloat16", 61 * (512 + 64) * 2),
        ("1T-mixture", 8, "bfloat16", 61 * (512 + 64) * 2),  # every GPU keeps the latent vector
    ],
)
def test_bytes_of_a_cached_token(model: str, tensor: int, dtype: str, expected: int) -> None:
    assert cached_bytes(SHAPES[model], tensor, dtype) == expected


def test_layers_with_a_state_cache_no_tokens() -> None:
    shape = SHAPES["Qwen3-8B"] | {"layer_types": ["linear_attention", "full_attention"] * 18}
    assert cached_bytes(shape, 1, "bfloat16") == cached_bytes(SHAPES["Qwen3-8B"], 1, "bfloat16") / 2


def test_the_cache_has_what_weights_leave() -> None:
    found = engine_memory(SHAPES["Qwen3-8B"], 8.19e9, 80 * GIB, fraction=0.9)
    assert found.weights == 2 * 8.19e9
    assert found.tokens == int((72 * GIB - 2 * 8.19e9) / (144 * 1024))
    assert found.episodes(8192) == found.tokens // 8192
    assert engine_memory(SHAPES["Qwen3-32B"], 32.8e9, 40 * GIB).tokens == 0


@given(
    taken=st.floats(0, 79 * GIB),
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 4),
    data=st.integers(1, 4),
)
def test_an_engine_never_uses_more_than_is_free(taken: float, tensor: int, pipeline: int, data: int) -> None:
    gpu = 80 * GIB
    found = engine_memory(
        SHAPES["Qwen3-8B"], 8.19e9, gpu, tensor=tensor, pipeline=pipeline, data=data, taken=taken, fraction=0.95
    )
    if found.tokens:
        used = found.weights + found.tokens / data * found.token
        assert used <= min(0.95 * gpu, gpu - taken - RESERVE)


def test_the_fewest_gpus_that_hold_an_engine() -> None:
    assert least_tensor(8.19e9, 80 * GIB, 8) == 1
    assert least_tensor(32.8e9, 80 * GIB, 8) == 2
    assert least_tensor(235e9, 80 * GIB, 8) == 8
    assert least_tensor(1e12, 80 * GIB, 8) == 8
