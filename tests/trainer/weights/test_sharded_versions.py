"""Ranks in any layout write the version that one rank writes, from their own shares and within their memory."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import save
from rank_versions import BUCKET_BYTES, WIDE, versions
from ranks import run_ranks
from safetensors.torch import load_file

from agentrl.trainer.distributed import World
from agentrl.trainer.weights.weight_stream import raw
from agentrl.versions.delta_codec import chunks_of
from agentrl.versions.delta_reader import DeltaFile
from agentrl.versions.version_manifest import VersionManifest, manifest_in

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),  # a tied head
    "phi3": ("phi3", {}),
    "mixture": ("mixture", {}),  # experts one by one in the files
    WIDE: ("qwen3", {"vocab_size": 4096, "hidden_size": 64}),
}
FOUR = (
    "1-1-1-1:qwen3:float32",
    "1-1-1-1:wide:bfloat16",
    "2-1-1-1:qwen3:bfloat16",
    "2-2-1-1:qwen3:bfloat16",
    "1-1-1-2:mixture:bfloat16",
    "1-2-1-2:mixture:float32",
    "1-2-1-1:qwen3:adapter",
)
TWO = ("1-1-1-1:mixture:bfloat16", "1-1-1-1:qwen3:adapter", "1-2-1-1:phi3:bfloat16", "1-1-1-1:wide:float32")
SLACK_BYTES = 32768
"""The facts of tensors that ranks exchange, and room between tensors in a message."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of model folders, whose files are small."""
    made = tmp_path_factory.mktemp("models")
    for name, (family, settings) in MODELS.items():
        save(family, made / name, **settings)
    return made


@pytest.mark.parametrize(
    ("ranks", "cases"), [pytest.param(4, FOUR, id="four", marks=pytest.mark.long), pytest.param(2, TWO, id="two")]
)
def test_any_layout_of_ranks_writes_the_version_of_one(
    root: Path, world: World, tmp_path: Path, ranks: int, cases: tuple[str, ...]
) -> None:
    named = [case.split(":") for case in cases]
    run_ranks("rank_versions.py", ranks, tmp_path, *(f"{layout}:{root / name}:{kind}" for layout, name, kind in named))
    for layout, name, kind in named:
        alone, found = tmp_path / "alone" / name / kind, tmp_path / layout / name / kind
        if not alone.exists():
            versions(root / name, kind, alone, world)
        for one, several in zip(facts_in(alone), facts_in(found), strict=True):
            above = several.pop("above_share")
            if name == WIDE:
                assert max(above) <= 2 * BUCKET_BYTES + SLACK_BYTES, (layout, kind, above)
            one.pop("above_share")
            drop_sizes(one)
            drop_sizes(several)
            assert several == one, (layout, name, kind)
        assert_same_folders(found, alone, ranks)


def facts_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "facts.json").read_text())
    return found


def drop_sizes(facts: dict[str, Any]) -> None:
    """Headers of several files are longer than that of one."""
    facts["metrics"].pop("publish/bytes")


def assert_same_folders(found: Path, alone: Path, ranks: int) -> None:
    """The same tensors in every version, the same exported model, and deltas that make what they say."""
    for name in ("v1-a", "v2-a", "v3-a"):
        manifest, expected = manifest_in(found / name), manifest_in(alone / name)
        assert manifest is not None
        assert expected is not None
        assert manifest.tensors == expected.tensors
        assert (manifest.whole is None) == (expected.whole is None) == (name == "v2-a")
        if manifest.whole is not None:
            assert_same_tensors(tensors_in(found / name), tensors_in(alone / name))
            assert len([file for file in manifest.whole if file.name.startswith("model-")]) in (0, ranks)
    assert_same_tensors(tensors_in(found / "model"), tensors_in(alone / "model"))
    assert_delta_applies(found)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())


def assert_delta_applies(folder: Path) -> None:
    """The delta of v2 turns the tensors of v1 into those whose digests it states."""
    second: VersionManifest | None = manifest_in(folder / "v2-a")
    assert second is not None
    assert second.delta is not None
    assert second.delta.parent == "v1-a"
    held = {name: tensor.contiguous() for name, tensor in tensors_in(folder / "v1-a").items()}
    for file in second.delta.files:
        delta = DeltaFile(folder / "v2-a" / file.name)
        for name in delta.names:
            fact = second.by_name[name]
            parts = chunks_of(fact.size_bytes)
            for part, chunk in zip(parts, delta.chunks(fact), strict=True):
                delta.apply(chunk, raw(held[name])[part], fact.item_bytes)
    for fact in second.tensors:
        assert sha256(raw(held[fact.name])).hexdigest() == fact.sha256
