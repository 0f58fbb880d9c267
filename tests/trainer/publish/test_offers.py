"""Tensors that all ranks bring to engines, without the model on rank 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from layouts import save
from ranks import run_ranks
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two ranks wrote."""
    out = tmp_path_factory.mktemp("offered")
    run_ranks("rank_offers.py", 2, out, save("Qwen3", out / "model"))
    return out


def test_engines_get_every_tensor_from_the_ranks_shares(offered: Path) -> None:
    own = load_file(offered / "own.safetensors")
    for way in ("shared", "broadcast"):
        found = load_file(offered / f"{way}.safetensors")
        assert found.keys() == own.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_each_rank_hands_its_files_over_and_every_failure_ends_all_processes(offered: Path) -> None:
    first, second = (json.loads((offered / f"handed-{rank}.json").read_text()) for rank in (0, 1))
    files = [["v3-c", "0.safetensors", "2.safetensors"], ["v3-c", "1.safetensors"]]
    assert first == {
        "nothing": ["ended", files[0]],
        "the engines": ["was killed", files[0], "ConnectionError"],
        "rank 0": ["did not start", [], "NoHandles"],
        "rank 1": ["ended", files[0]],
    }
    assert second == {
        "nothing": ["ended", files[1]],
        "the engines": ["was killed", files[1]],
        "rank 0": ["was killed", files[1]],
        "rank 1": ["did not start", []],
    }
