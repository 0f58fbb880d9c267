"""Ranks that divide tensors, tokens or experts, in any product, make the update of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import MODELS, Found, assert_same, save
from rank_parallel import CONFIGS, measured, start, updates
from ranks import run_ranks
from safetensors.torch import load_file

from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models

Alone = dict[tuple[str, str], Found]
FOUR = (  # replicas-tensor-context-experts, model, what trains, and "+" to go on from a checkpoint
    "1-2-1-1:qwen3:full",
    "1-1-4-1:odd:full",  # copies of key/value heads, and heads of zeros
    "1-2-2-1:qwen3:adapter",
    "2-1-2-1:qwen3:full",
    "1-1-1-2:pair:full",  # an expert sharded by rows
    "2-1-1-2:mixture:full",  # experts that no rank of a replica shares
    "1-2-2-2:mixture:full+",
)
FURTHER = (
    "2-2-1-1:qwen3:full+",
    "1-2-1-1:phi3:full+",
    "1-2-1-1:mixture:full",  # a tensor group shares experts
    "1-2-1-4:mixture:full+",
    "1-1-2-4:mixture:top",
    "1-1-4-2:mixture:full",
    "1-1-2-2:mixture:adapter",
    "2-1-2-2:pair:top",
    "1-1-2-1:sinks:full",
    "1-1-1-2:sinks:full",
)
TWO = ("1-2-1-1:phi3:full", "1-2-1-1:qwen3:adapter", "1-1-2-1:odd:adapter", "1-1-1-2:mixture:full")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of model folders."""
    made = tmp_path_factory.mktemp("models")
    for name in MODELS:
        save(name, made / name)
    return made


@pytest.fixture(scope="module")
def alone(root: Path, tmp_path_factory: pytest.TempPathFactory, world: World) -> Alone:
    """What one rank computes; filled when first needed."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        pytest.param(4, FOUR, id="four"),
        pytest.param(4, FURTHER, id="further", marks=pytest.mark.long),
        pytest.param(2, TWO, id="two", marks=pytest.mark.long),
    ],
)
def test_any_layout_of_ranks_makes_the_update_of_one(
    root: Path, alone: Alone, world: World, tmp_path: Path, ranks: int, cases: tuple[str, ...]
) -> None:
    named = [case.split(":") for case in cases]
    run_ranks("rank_parallel.py", ranks, tmp_path, *(f"{layout}:{root / name}:{kind}" for layout, name, kind in named))
    for case, (layout, name, kind) in zip(cases, named, strict=True):
        if (name, kind) not in alone:
            alone[name, kind] = measured(root / name, kind, tmp_path / "alone" / name, world)
        found = load_file(tmp_path / layout / name / f"{kind}.safetensors")
        assert_same(found, alone[name, kind], case)
        if kind.endswith("+"):
            goes_on_alone(root / name, kind, tmp_path / layout / name, found, world)


def goes_on_alone(folder: Path, kind: str, checkpoints: Path, expected: Found, world: World) -> None:
    """One rank makes the second step from the checkpoint that several made of the first."""
    config = CONFIGS[kind.rstrip("+")]
    made, optimizer = start(folder, config, world)
    saved = checkpoint_folders.read(checkpoints / f"step-000001-{kind}")
    run_models.restore(saved, made, optimizer, config, world)
    found = {f"2/{name}": tensor for name, tensor in updates(made, optimizer, config, 2, world).items()}
    assert_same(found, {name: tensor for name, tensor in expected.items() if name.startswith("2/")})
