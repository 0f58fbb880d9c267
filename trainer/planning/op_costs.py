"""Estimates how long a GPU takes for an operation, by roofline: the longer of its arithmetic and its memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from agentrl.trainer.metrics.devices import Device

PRODUCTS = 0.7
"""Share of the peak that large matrix products reach."""
TRAFFIC = 0.8
"""Share of the memory's bandwidth that kernels reach."""
LAUNCH_S = 5e-6
"""The least time of a kernel: a CPU starts them one by one."""
FLOAT32_SLOWDOWN = 2.0
"""float32 products run as TF32, at half of bfloat16's peak."""
aten = torch.ops.aten
NOT_KERNELS = ("c10d", "_c10d_functional", "_dtensor", "prim", "prims")
"""Namespaces of collectives and of questions about a tensor."""
FREE = {
    op
    for name in ("_unsafe_view", "alias", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty")
    for op in (getattr(aten, name),)
}
"""Operations that only make room or look at a tensor in another way."""
GROUPED = (aten._grouped_mm.default,)
FLASH = aten._scaled_dot_product_flash_attention
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward


class OpCosts:
    """Sums floating-point operations and seconds of a device's operations."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.flops = 0.0
        self.seconds = 0.0

    def watch(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation."""
        if func.is_view or func.namespace in NOT_KERNELS or func._overloadpacket in FREE:
            return
        flops = operations(func, args, kwargs, result)
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        if not tensors:
            return
        moved = sum(t.nbytes for t in {id(t): t for t in tensors}.values())
        slow = FLOAT32_SLOWDOWN if any(t.dtype == torch.float32 for t in tensors[:2]) else 1.0
        arithmetic = flops * slow / (self._device.flops * PRODUCTS)
        self.flops += flops
        self.seconds += max(arithmetic, moved / (self._device.memory_gb_s * 1e9 * TRAFFIC), LAUNCH_S)


def operations(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Floating-point operations of an operation's products; 0 for operations without products.

    Causal attention computes half of its products.
    """
    if func in GROUPED:
        return _of_grouped(*args[:2])
    formula = FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0.0
    causal = any(a.name == "is_causal" and value for a, value in zip(func._schema.arguments, args, strict=False))
    causal = causal or bool(kwargs.get("is_causal"))
    return float(formula(*args, **kwargs, out_val=result)) * (0.5 if causal else 1.0)


def _of_flash(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Scores and their product with the values, (B, H, S, D) each: the heads of keys and values may be fewer."""
    return 2.0 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _of_flash_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> float:
    """The scores again, and the gradients of scores, values, queries and keys."""
    return 2.0 * query.shape[:-1].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


FORMULAS: dict[Any, Callable[..., float]] = {FLASH: _of_flash, FLASH_BACKWARD: _of_flash_backward}
"""In torch 2.11 its own formulas refuse queries with more heads than keys."""


def _of_grouped(first: Tensor, second: Tensor) -> float:
    """Each row of one matrix meets one of the groups: (M, K) · (G, K, N), or (K, M) · (M, N) over groups of M."""
    if second.dim() == 3:
        return 2.0 * first.shape[-2] * first.shape[-1] * second.shape[-1]
    return 2.0 * first.shape[0] * first.shape[1] * second.shape[1]
