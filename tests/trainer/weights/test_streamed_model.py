"""A checkpoint as a Hugging Face folder: the same tensors as the model in memory, read and written one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from checkpointed_policy import FACTS
from folders import read_part, save_kind
from layouts import save
from ranks import run_ranks
from safetensors.torch import load_file
from support import AGES, random_samples

from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.errors import ModelFolderError, StoreError
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import STATE, Checkpoint, StepRecord
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import collate, make_units
from agentrl.trainer.update import update_policy
from agentrl.trainer.weights import model_export, streamed_model
from agentrl.versions.tensor_header import read_header

ADAPTER = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])


def trained(
    base: Path,
    root: Path,
    world: World,
    adapter: LoraConfig = LoraConfig(),
    layers: int | None = None,
    steps: int = 1,
) -> tuple[Policy, Checkpoint]:
    """A policy after some steps, and its checkpoint."""
    config = TrainerConfig(lr=1e-2, lora=adapter)
    policy: Policy = load_sharded(Policy, base, world.mesh, adapter=adapter, train_layers=layers)
    optimizer = make_optimizer(policy, config)
    for _ in range(steps):
        update_policy(policy, optimizer, random_samples(), 1, AGES, config, world)
    record = StepRecord(step=12, version=13, batch=FACTS, metrics={})
    parts = checkpoint_writer.state_of("policy", policy, optimizer)
    return policy, checkpoint_writer.begin(root, record, parts, world, copied=False).finish()


def tensors_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """File → its tensors."""
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def assert_same_files(one: Path, other: Path) -> None:
    left, right = tensors_of(one), tensors_of(other)
    assert {name: sorted(of) for name, of in left.items()} == {name: sorted(of) for name, of in right.items()}
    for file, of in left.items():
        for name, tensor in of.items():
            assert tensor.dtype == right[file][name].dtype
            assert torch.equal(tensor, right[file][name]), name


@pytest.mark.parametrize(
    ("kind", "dtype", "shard"),
    [
        ("qwen2-tied", torch.float32, "5GB"),
        ("llama-untied", torch.bfloat16, "20KB"),
        ("qwen3-experts", torch.float32, "20KB"),
        ("mixtral", torch.bfloat16, "5GB"),
    ],
)
def test_the_folder_has_the_tensors_of_the_model_in_memory(
    tmp_path: Path, world: World, kind: str, dtype: torch.dtype, shard: str
) -> None:
    base = save_kind(kind, tmp_path / "base", dtype=dtype, shard=shard)
    policy, found = trained(base, tmp_path / "checkpoints", world)
    model_export.export(tmp_path / "run", policy, base, LoraConfig(), world)
    streamed_model.write(tmp_path / "out", found, base, LoraConfig(), "r")
    assert_same_files(tmp_path / "out", tmp_path / "run" / "model")
    before = tensors_of(base)
    changed = [
        n for file, of in tensors_of(tmp_path / "out").items() for n in of if not torch.equal(of[n], before[file][n])
    ]
    assert changed
    for path in base.glob("*.safetensors"):
        assert read_header(path) == read_header(tmp_path / "out" / path.name)
    facts = json.loads((tmp_path / "out" / streamed_model.FACTS).read_text())
    assert facts == {"run": "r", "step": 12, "step_id": "s", "version": 13, "digest": found.digest}


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3-experts"])
def test_transformers_computes_with_the_folder_as_the_policy_does(tmp_path: Path, world: World, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    base = save_kind(kind, tmp_path / "base")
    policy, found = trained(base, tmp_path / "checkpoints", world)
    streamed_model.write(tmp_path / "out", found, base, LoraConfig(), "r")
    batch = collate(make_units(random_samples(5), 4096))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, local_files_only=True)
    again: Policy = load_sharded(Policy, tmp_path / "out", world.mesh)
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(policy(batch)[0], again(batch)[0])
        policy.read("computed as transformers does", plainly=True)
        torch.testing.assert_close(loaded(ids).logits, policy.lm(ids).logits, rtol=1e-5, atol=1e-5)


def test_only_the_trained_layers_differ_from_the_base_model(tmp_path: Path, world: World) -> None:
    base = save_kind("llama-tied", tmp_path / "base")
    _, found = trained(base, tmp_path / "checkpoints", world, layers=1)
    streamed_model.write(tmp_path / "out", found, base, LoraConfig(), "r")
    old, new = tensors_of(base)["model.safetensors"], tensors_of(tmp_path / "out")["model.safetensors"]
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.startswith(("model.layers.2.", "model.norm.")) for name in changed)


def test_an_adapter_is_merged_or_written_by_itself(tmp_path: Path, world: World) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = save_kind("llama-untied", tmp_path / "base", shard="20KB")
    policy, found = trained(base, tmp_path / "checkpoints", world, ADAPTER)
    model_export.export(tmp_path / "run", policy, base, ADAPTER, world)
    streamed_model.write(tmp_path / "merged", found, base, ADAPTER, "r")
    assert_same_files(tmp_path / "merged", tmp_path / "run" / "model")
    streamed_model.write(tmp_path / "adapter", found, base, ADAPTER, "r", merged=False)
    assert_same_files(tmp_path / "adapter", tmp_path / "run" / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    adapted = PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, local_files_only=True)
    ids = torch.randint(0, 97, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [pytest.param("1-2-1-1:qwen3:full+", marks=pytest.mark.long), "1-1-1-2:mixture:full+"])
def test_a_tensor_that_several_ranks_wrote_is_read_whole(tmp_path: Path, world: World, case: str) -> None:
    layout, name, kind = case.split(":")
    base = save(name, tmp_path / name)
    run_ranks("rank_parallel.py", 2, tmp_path / "out", f"{layout}:{base}:{kind}")
    found = checkpoint_folders.read(tmp_path / "out" / layout / name / f"step-000001-{kind}")
    tensors = CheckpointTensors(found.folder, "policy")
    expected = read_part(found.folder, "policy", world)
    assert tensors.names == expected.keys()
    assert all(torch.equal(tensors.read(name), expected[name]) for name in expected)
    streamed_model.write(tmp_path / "model", found, base, LoraConfig(), "r")


def test_a_checkpoint_that_is_deleted_or_damaged_meanwhile_is_named(tmp_path: Path, world: World) -> None:
    base = save_kind("qwen2-tied", tmp_path / "base")
    _, found = trained(base, tmp_path / "checkpoints", world)
    tensors = CheckpointTensors(found.folder, "policy")
    (state,) = (found.folder / STATE).glob("*.distcp")
    data = state.read_bytes()
    state.write_bytes(data[:100])
    with pytest.raises(StoreError, match="is damaged"):
        tensors.read("model.norm.weight")
    state.unlink()
    with pytest.raises(StoreError, match=r"distcp cannot be read: No such file"):
        streamed_model.write(tmp_path / "out", found, base, LoraConfig(), "r")
    assert not list(tmp_path.glob("*out*"))
    (found.folder / STATE / ".metadata").write_bytes(b"x")
    with pytest.raises(StoreError, match="is damaged"):
        CheckpointTensors(found.folder, "policy")


def test_another_base_model_is_refused(tmp_path: Path, world: World) -> None:
    base = save_kind("qwen2-untied", tmp_path / "base")
    _, found = trained(base, tmp_path / "checkpoints", world)
    for kind, said in (("qwen2-tied", "has no tensor for lm_head.weight"), ("mixtral", "has no tensor for")):
        with pytest.raises(ModelFolderError, match=said):
            streamed_model.write(tmp_path / "out", found, save_kind(kind, tmp_path / kind), LoraConfig(), "r")


def test_a_damaged_file_of_the_base_model_is_named(tmp_path: Path) -> None:
    path, nothing = tmp_path / "model.safetensors", cast(streamed_model.Trained, {})
    path.write_bytes(b"{}")
    with pytest.raises(ModelFolderError, match=r"model\.safetensors is not a safetensors file"):
        streamed_model.copy_file(path, tmp_path / "out", nothing)


@pytest.mark.parametrize(
    ("kind", "adapter"), [("qwen3-experts", LoraConfig()), ("llama-untied", ADAPTER), ("mixtral", LoraConfig())]
)
def test_a_mean_is_that_of_the_whole_matrices(tmp_path: Path, world: World, kind: str, adapter: LoraConfig) -> None:
    base = save_kind(kind, tmp_path / "base", shard="20KB")
    found = [trained(base, tmp_path / f"run{n}", world, adapter, steps=n)[1] for n in (1, 3)]
    for n, one in enumerate(found):
        streamed_model.write(tmp_path / str(n), one, base, adapter, "r")
    streamed_model.write_mean(tmp_path / "mean", [(found[0], 1.0), (found[1], 3.0)], base, adapter, "r")
    parts = [tensors_of(tmp_path / name) for name in ("0", "1", "mean")]
    moved = 0
    for file, of in parts[2].items():
        for name, tensor in of.items():
            first, second = (parts[n][file][name].double() for n in range(2))
            torch.testing.assert_close(tensor.double(), 0.25 * first + 0.75 * second, rtol=1e-5, atol=1e-6)
            moved += not torch.equal(first, second)
    assert moved
