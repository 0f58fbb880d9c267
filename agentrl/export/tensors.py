"""AReaL's tensor dict: right-padded arrays of a batch, in memory or as one .safetensors file.

input_ids       (N, T) int32    0 for padding
attention_mask  (N, T) bool     false for padding
loss_mask       (N, T) int32
logprobs        (N, T) float32  0 for tokens that were not sampled
versions        (N, T) int32    -1 for tokens that were not sampled
rewards         (N,)   float32  the return of the trajectory's episode

`pad_batch` adds the experts that engines chose, where trajectories have them:

routed_experts  (N, T, layers, top_k) int16  experts of a token in ascending order
expert_origins  (N, T) uint8                 RouteOrigin; 0 (MISSING) also for padding
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens

Arrays = dict[str, npt.NDArray[Any]]

DTYPES: dict[str, tuple[type[np.generic], str]] = {  # numpy's type and safetensors' name for it
    "input_ids": (np.int32, "I32"),
    "attention_mask": (np.bool_, "BOOL"),
    "loss_mask": (np.int32, "I32"),
    "logprobs": (np.float32, "F32"),
    "versions": (np.int32, "I32"),
    "rewards": (np.float32, "F32"),
}


def pad_batch(trajectories: Sequence[TrajectoryTokens]) -> Arrays:
    """The tensor dict of N trajectories; T is the longest length. Without trajectories the shape is (0, 0)."""
    n, width = len(trajectories), max((len(t.input_ids) for t in trajectories), default=0)
    arrays: Arrays = {name: np.zeros(_shape(name, n, width), dtype) for name, (dtype, _) in DTYPES.items()}
    arrays["versions"].fill(PROMPT_VERSION)
    fill(arrays, 0, trajectories)
    return arrays | _experts(trajectories, n, width)


def _experts(trajectories: Sequence[TrajectoryTokens], n: int, width: int) -> Arrays:
    routed = [(row, t.routed) for row, t in enumerate(trajectories) if t.routed is not None]
    if not routed:
        return {}
    experts = np.zeros((n, width, *routed[0][1].ids.shape[1:]), np.int16)
    origins = np.zeros((n, width), np.uint8)
    for row, one in routed:
        experts[row, : len(one)], origins[row, : len(one)] = one.ids, one.origins
    return {"routed_experts": experts, "expert_origins": origins}


def fill(arrays: Arrays, start: int, trajectories: Sequence[TrajectoryTokens]) -> None:
    """Write trajectories to rows `start`, `start + 1`, … of padded arrays."""
    ids, attention, loss = arrays["input_ids"], arrays["attention_mask"], arrays["loss_mask"]
    logprobs, versions = arrays["logprobs"], arrays["versions"]
    for row, t in enumerate(trajectories, start):
        length = len(t.input_ids)
        ids[row, :length] = t.input_ids
        attention[row, :length] = True
        loss[row, :length] = t.loss_mask
        logprobs[row, :length] = t.logprobs
        versions[row, :length] = t.versions
    arrays["rewards"][start : start + len(trajectories)] = [t.episode_return for t in trajectories]


def create_file(path: Path, n: int, width: int, metadata: dict[str, str]) -> Arrays:
    """Create a .safetensors file of N x T padding, memory-mapped so that `fill` needs little memory.

    The file is complete once the arrays are flushed or deleted.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, label) in _by_alignment():
        shape = _shape(name, n, width)
        begin, end = end, end + int(np.prod(shape)) * np.dtype(dtype).itemsize
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    arrays: Arrays = {}
    for name, (dtype, _) in _by_alignment():
        shape, offset = _shape(name, n, width), 8 + len(text) + header[name]["data_offsets"][0]
        empty = 0 in shape  # nothing to map
        arrays[name] = np.empty(shape, dtype) if empty else np.memmap(path, dtype, "r+", offset, shape)
    for row in range(n):
        arrays["versions"][row].fill(PROMPT_VERSION)
    return arrays


def _by_alignment() -> list[tuple[str, tuple[type[np.generic], str]]]:
    """Sort wide types first, so that each array is aligned to its item size."""
    return sorted(DTYPES.items(), key=lambda item: -np.dtype(item[1][0]).itemsize)


def _shape(name: str, n: int, width: int) -> tuple[int, ...]:
    return (n,) if name == "rewards" else (n, width)
