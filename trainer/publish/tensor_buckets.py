"""The tensors of a version in buckets to send, and the digests by which engines' copies are compared."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.multiprocessing
from torch import Tensor

from agentrl.trainer.publish.weights import bytes_digest
from agentrl.versions.weights_folder import in_threads

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that engines keep as one, the rows of its parts one after another."""


PADDED = ("embed_tokens", "lm_head")
"""Matrices whose rows engines pad to a multiple of PADDING."""


PADDING = 64


Buckets = list[dict[str, Tensor]]


def in_buckets(tensors: Mapping[str, Tensor], size: int) -> Buckets:
    """The tensors in order, in buckets of at most `size` bytes; a larger tensor has a bucket of its own."""
    buckets: Buckets = []
    room = 0
    for name, tensor in tensors.items():
        if not buckets or tensor.nbytes > room:
            buckets.append({})
            room = size
        buckets[-1][name] = tensor
        room -= tensor.nbytes
    return buckets


def digests(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """The start of each tensor's SHA-256, by the engine's names, as an engine of one rank on a CPU reports them.

    Covers tensors that the engine keeps unchanged, and matrices of FUSED whose parts are all in `tensors`. `dtype` is
    the type of the engine. Tensors of another type are left out, since engines may keep or convert them.
    """
    kept: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if any(part in name for part in PADDED) and len(tensor) % PADDING:
            continue
        if tensor.dtype != dtype:
            continue
        fused_name = next((fused for fused, parts in FUSED.items() if any(f".{p}." in name for p in parts)), None)
        if fused_name is None:
            kept[name] = [tensor]
            continue
        first, *_ = FUSED[fused_name]
        if f".{first}." in name:
            parts = [name.replace(f".{first}.", f".{part}.") for part in FUSED[fused_name]]
            if all(part in tensors for part in parts):
                kept[name.replace(f".{first}.", f".{fused_name}.")] = [tensors[part] for part in parts]
    return {name: found.hex()[:16] for name, found in zip(kept, in_threads(bytes_digest, kept.values()), strict=True)}
