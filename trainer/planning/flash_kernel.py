"""The attention kernel that a trace assumes: flash attention, whose memory is linear in the tokens.

Without it `scaled_dot_product_attention` of an unknown device is traced as plain products, quadratic in the tokens.
Attention that calls the operations of flash attention itself is traced as it is.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def register() -> torch.library.Library:
    """Compute `scaled_dot_product_attention` of the fake accelerator by flash attention. A mask costs nothing."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", flash, "AutogradPrivateUse1")
    return library


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
