"""SGLang's RMSNorm and rotary embedding with fewer torch calls, for float32 on a CPU. Imports torch.

A decode step of a small model has thousands of torch calls on a few tokens each, so their number counts. Layers with
other settings go on with SGLang's own code. Results differ from it by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

Forward = Callable[..., Any]


def fast_norm(stock: Forward) -> Forward:
    """A `forward` for RMSNorm; `stock` is the one that it replaces."""

    def forward(
        self: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None, *others: Any
    ) -> Any:
        plain = self.variance_size_override is None and not others and post_residual_addition is None
        if not plain or not x.dtype == self.weight.dtype == torch.float32 or self.override_orig_dtype is not None:
            return stock(self, x, residual, post_residual_addition, *others)
        if residual is None:
            return rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
        total = x + residual
        return rms_norm(total, (self.hidden_size,), self.weight, self.variance_epsilon), total

    return forward


class RotaryAngles:
    """The cosines and sines of the positions of one forward pass, which all layers share."""

    def __init__(self) -> None:
        self._positions: Tensor | None = None
        self._cache: Tensor | None = None
        self._angles: tuple[Tensor, Tensor] | None = None

    def begin(self) -> None:
        """Begin a forward pass: its positions may be other values in the same tensor."""
        self._positions = self._cache = self._angles = None

    def of(self, positions_N: Tensor, cache_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines (N, 1, D), and sines whose first half is negative, from lines of a cache (cosines, sines)."""
        if self._angles is None or self._positions is not positions_N or self._cache is not cache_PD:
            cos, sin = cache_PD.index_select(0, positions_N)[:, None].chunk(2, dim=-1)
            self._angles = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            self._positions, self._cache = positions_N, cache_PD
        return self._angles


def fast_rotary(stock: Forward, angles: RotaryAngles) -> Forward:
    """A `forward` for a rotary embedding of whole heads by halves (NeoX); `stock` is the one that it replaces."""

    def forward(
        self: Any,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[Tensor, Tensor]:
        plain = self.is_neox_style and self.rotary_dim == self.head_size and positions.ndim == 1
        if not plain or offsets is not None or fused_set_kv_buffer_arg is not None or query.dtype != torch.float32:
            rotated: tuple[Tensor, Tensor] = stock(self, positions, query, key, offsets, fused_set_kv_buffer_arg)
            return rotated
        cos, sin = angles.of(positions, self.cos_sin_cache)
        return _rotated(query, cos, sin, self.head_size), _rotated(key, cos, sin, self.head_size)

    return forward


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
    heads = x.view(len(x), -1, size)
    return torch.addcmul(heads * cos, heads.roll(size // 2, -1), sin).view(x.shape)
