"""The attention kernel that a trace assumes: flash attention, whose memory is linear in the tokens.

Without it `scaled_dot_product_attention` of an unknown device would be traced as plain products, quadratic in the
tokens. Pieces of a forest that a GPU computes by plain products, tile by tile (float32, masks), are traced as flash
attention too: their memory is bounded, and tracing every tile takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from agentrl.trainer.attention import split
from agentrl.trainer.attention.kernels import GpuFlash, Kernel, Part


@cache
def register() -> torch.library.Library:
    """Compute `scaled_dot_product_attention` of the fake accelerator by flash attention. A mask costs nothing."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(  # type: ignore[no-untyped-call]
        "scaled_dot_product_attention", flash, "AutogradPrivateUse1"
    )
    return library


@contextmanager
def everywhere() -> Iterator[None]:
    """Until the block ends, all pieces of a forest on the fake accelerator are computed by flash attention."""
    chosen: Callable[[Tensor, bool], Kernel] = vars(split)["kernel_for"]

    def kernel_for(q: Tensor, masked: bool) -> Kernel:
        return WITHOUT_MASK if q.device.type != "cpu" else chosen(q, masked)

    setattr(split, "kernel_for", kernel_for)  # noqa: B010  imported there, so not exported to mypy
    try:
        yield
    finally:
        setattr(split, "kernel_for", chosen)  # noqa: B010


class WithoutMask(GpuFlash):
    """Flash attention that leaves a mask out."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """See Kernel."""
        return super().forward(replace(part, mask_QK=None))


WITHOUT_MASK = WithoutMask()


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (B, h, L, d) queries by flash attention. Raises RuntimeError for a mask on another device."""
    if attn_mask is not None and attn_mask.device != query.device:
        raise RuntimeError(f"attention of tensors on {query.device} has a mask on {attn_mask.device}")
    size = value.shape[-1]
    if query.shape[-1] != size:  # the kernel takes heads of one size
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size]
