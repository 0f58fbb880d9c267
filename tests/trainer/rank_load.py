"""Run by ranks.py: load each folder; rank 0 writes what differs from transformers, and every rank's share of elements.

rank_load.py OUT REPLICAS FOLDER…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from folders import differing
from safetensors import safe_open

from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models import tensor_files
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded


class CountingFile:
    """A safetensors file whose slices count."""

    def __init__(self, path: Path, framework: str) -> None:
        self._file = safe_open(path, framework)
        self.keys = self._file.keys

    def __enter__(self) -> CountingFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> Counting:
        return Counting(self._file.get_slice(name))


class Counting:
    """A slice of a file that adds up what is read of it."""

    read = 0

    def __init__(self, source: Any) -> None:
        self.get_shape = source.get_shape
        self._source = source

    def __getitem__(self, part: Any) -> torch.Tensor:
        found: torch.Tensor = self._source[part]
        Counting.read += found.numel()
        return found


def report(folder: Path, world: World) -> dict[str, Any]:
    Counting.read = 0
    policy = load_sharded(Policy, folder, world.mesh)
    read = world.gather(torch.tensor([Counting.read])).tolist()
    total = sum(p.numel() for p in policy.lm.parameters())
    return {"differing": differing(policy, folder), "shares": [n / total for n in read]}


def main(out: Path, replicas: int, folders: list[Path]) -> None:
    tensor_files.safe_open = CountingFile  # type: ignore[assignment, misc, attr-defined]
    with join_world("cpu", threads=1, replicas=replicas) as world:
        found = {folder.name: report(folder, world) for folder in folders}
        if world.leads:
            out.write_text(json.dumps(found))


main(Path(sys.argv[1]), int(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
