"""The digests by which an engine's copies of tensors are compared with the trainer's, by the engine's names."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from agentrl.trainer.weights.ownership import Output

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Matrices that engines keep as one, the rows of its parts one after another."""
PADDED = ("embed_tokens", "lm_head")
"""Matrices whose rows engines pad to a multiple of PADDING."""
PADDING = 64
DIGEST_CHARACTERS = 16
"""How much of a SHA-256, in hexadecimal, engines report."""


def engine_name(name: str) -> str:
    """The name of the engine's tensor that has the tensor of this name, or has it among others."""
    for fused, parts in FUSED.items():
        for part in parts:
            if f".{part}." in name:
                return name.replace(f".{part}.", f".{fused}.")
    return name


def part_order(name: str) -> int:
    """The place of a tensor among those of its engine's tensor."""
    return next((i for parts in FUSED.values() for i, part in enumerate(parts) if f".{part}." in name), 0)


def compared(outputs: Iterable[Output], dtype: torch.dtype) -> dict[str, list[str]]:
    """Name in an engine of one rank on a CPU → the version's tensors that it consists of, one after another.

    Covers tensors that the engine keeps unchanged, and matrices of FUSED whose parts are all in the version. `dtype` is
    the type of the engine. Tensors of another type are left out, since engines may keep or convert them.
    """
    kept = {output.name: output for output in outputs if output.dtype == dtype and not _is_padded(output)}
    found: dict[str, list[str]] = {}
    for name in kept:
        whole = engine_name(name)
        if whole == name:
            found[name] = [name]
        elif whole not in found and all(part in kept for part in _parts(whole)):
            found[whole] = _parts(whole)
    return found


def _parts(whole: str) -> list[str]:
    fused = next(fused for fused in FUSED if f".{fused}." in whole)
    return [whole.replace(f".{fused}.", f".{part}.") for part in FUSED[fused]]


def _is_padded(output: Output) -> bool:
    return any(part in output.name for part in PADDED) and bool(output.shape[0] % PADDING)
