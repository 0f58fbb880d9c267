"""Tensors that all ranks bring to engines, without the model on rank 0."""

from __future__ import annotations

from pathlib import Path

import torch
from layouts import save
from ranks import run_ranks
from safetensors.torch import load_file


def test_engines_get_every_tensor_from_the_ranks_shares(tmp_path: Path) -> None:
    run_ranks("rank_offers.py", 2, tmp_path, save("Qwen3", tmp_path / "model"))
    own = load_file(tmp_path / "own.safetensors")
    for way in ("shared", "broadcast"):
        found = load_file(tmp_path / f"{way}.safetensors")
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())
