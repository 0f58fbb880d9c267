"""RMSNorm and rotary embedding, compared with SGLang's own `forward_native`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

from agentrl.engine.sglang.cpu.fast_layers import RotaryAngles, fast_norm, fast_rotary

WIDTH, HEAD = 12, 8


def norm(**changed: Any) -> Any:
    settings = {"hidden_size": WIDTH, "variance_epsilon": 1e-5, "variance_size_override": None, "has_weight": True}
    others = {"override_orig_dtype": None, "fp32_residual": False, "cast_x_before_out_mul": False}
    return SimpleNamespace(**(settings | others | {"weight": torch.randn(WIDTH)} | changed))


def rotary(**changed: Any) -> Any:
    settings = {"head_size": HEAD, "rotary_dim": HEAD, "is_neox_style": True, "cos_sin_cache": torch.randn(50, HEAD)}
    return SimpleNamespace(**(settings | {"_apply_rotary_emb_wrapped": apply_rotary_emb} | changed))


@pytest.mark.parametrize("changed", [{}, {"variance_size_override": 6}, {"fp32_residual": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_those_of_sglang(changed: dict[str, Any], dtype: torch.dtype) -> None:
    layer, x, residual = norm(**changed), torch.randn(5, WIDTH).to(dtype), torch.randn(5, WIDTH).to(dtype)
    forward = fast_norm(RMSNorm.forward_native)
    torch.testing.assert_close(forward(layer, x), RMSNorm.forward_native(layer, x))
    for found, expected in zip(forward(layer, x, residual), RMSNorm.forward_native(layer, x, residual), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changed", [{}, {"is_neox_style": False}, {"rotary_dim": 4}])
def test_rotations_are_those_of_sglang(changed: dict[str, Any]) -> None:
    layer = rotary(**changed)
    layer.cos_sin_cache = layer.cos_sin_cache[:, : layer.rotary_dim]
    qkv = torch.randn(6, 5 * HEAD)
    query, key = qkv[:, : 3 * HEAD], qkv[:, 3 * HEAD : 4 * HEAD]  # views, as the model makes them
    positions = torch.tensor([0, 7, 7, 1, 49, 3])
    forward = fast_rotary(RotaryEmbedding.forward_native, RotaryAngles())
    expected = RotaryEmbedding.forward_native(layer, positions, query, key)
    for found, right in zip(forward(layer, positions, query, key), expected, strict=True):
        torch.testing.assert_close(found, right)


def test_angles_are_read_anew_in_each_pass_and_for_each_kind_of_layer() -> None:
    angles, positions, caches = RotaryAngles(), torch.tensor([1, 2]), torch.randn(2, 50, HEAD)
    first, other = angles.of(positions, caches[0])[0], angles.of(positions, caches[1])[0]
    assert not torch.equal(first, other)
    local = caches[0]
    assert angles.of(positions, local)[0] is angles.of(positions, local)[0]
    positions += 1
    angles.begin()
    torch.testing.assert_close(angles.of(positions, local)[0][:, 0, : HEAD // 2], local[[2, 3], : HEAD // 2])
