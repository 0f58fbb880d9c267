"""Streamed loading is transformers' own, bit for bit, and names what is wrong with a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import KINDS, differing, save_kind
from layouts import save
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from support import random_samples

from agentrl.errors import ModelFolderError
from agentrl.trainer.distributed import World
from agentrl.trainer.models.critic import Critic
from agentrl.trainer.models.loading import build, fill
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.models.tensor_files import INDEX, SINGLE
from agentrl.trainer.packing import collate, make_units
from agentrl.trainer.tuning.reward_model import RewardModel


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_buffers_equal_those_of_transformers(kind: str, tmp_path: Path, world: World) -> None:
    save_kind(kind, tmp_path)
    assert differing(load_sharded(Policy, tmp_path, world.mesh), tmp_path) == []


def test_several_files_and_another_type(tmp_path: Path, world: World) -> None:
    save_kind("llama-untied", tmp_path, dtype=torch.bfloat16, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert differing(load_sharded(Policy, tmp_path, world.mesh), tmp_path) == []


def test_tied_weights_stay_one_parameter(tmp_path: Path, world: World) -> None:
    lm = load_sharded(Policy, save_kind("qwen2-tied", tmp_path), world.mesh).lm
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_each_of_two_shards_reads_its_half(tmp_path: Path, ranks: int, replicas: int) -> None:
    folders = [save_kind(kind, tmp_path / kind) for kind in KINDS]
    folders.append(save_kind("qwen2-tied", tmp_path / "files", dtype=torch.bfloat16, shard="20KB"))
    out = tmp_path / "out.json"
    run_ranks("rank_load.py", ranks, out, replicas, *folders)
    found = json.loads(out.read_text())
    assert found.keys() == {f.name for f in folders}
    for name, report in found.items():
        assert report["differing"] == [], name
        assert len(report["shares"]) == ranks
        assert sum(report["shares"]) == pytest.approx(replicas), name
        assert max(report["shares"]) < 0.55, name


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Put tensors into the folder's file, or take them out; `__` in a name is a dot."""
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    held = load_file(folder / SINGLE) | changes
    save_file({n: t for n, t in held.items() if t is not None}, folder / SINGLE, metadata={"format": "pt"})


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path, world: World) -> None:
    save_kind("llama-untied", tmp_path)
    change(tmp_path, model__norm__weight=None, model__extra=torch.zeros(1))
    with pytest.raises(ModelFolderError, match=r"without model\.norm\.weight and with model\.extra$"):
        load_sharded(Policy, tmp_path, world.mesh)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path, world: World) -> None:
    save_kind("llama-untied", tmp_path)
    change(tmp_path, model__norm__weight=torch.zeros(7))
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight has shape \(7,\), the model has \(36,\)"):
        load_sharded(Policy, tmp_path, world.mesh)


def test_a_mixture_with_narrow_experts_is_computed_expert_by_expert(tmp_path: Path, world: World) -> None:
    """Rows of 10 numbers are no multiple of 16 bytes; of 24 they are."""
    narrow, wide = (
        load_sharded(Policy, save("mixture", tmp_path / str(size), moe_intermediate_size=size), world.mesh)
        for size in (10, 24)
    )
    assert narrow.lm.config._experts_implementation == "eager"
    assert wide.lm.config._experts_implementation == "grouped_mm"
    assert not narrow.unpacked


def test_a_tied_head_may_be_in_the_file_if_it_is_the_same(tmp_path: Path, world: World) -> None:
    save_kind("qwen2-tied", tmp_path)
    embedding = load_file(tmp_path / SINGLE)["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone())
    assert differing(load_sharded(Policy, tmp_path, world.mesh), tmp_path) == []
    change(tmp_path, lm_head__weight=embedding, model__embed_tokens__weight=None)
    assert differing(load_sharded(Policy, tmp_path, world.mesh), tmp_path) == []
    change(tmp_path, model__embed_tokens__weight=embedding + 1)
    with pytest.raises(ModelFolderError, match="differs from the tensor that the model ties it to"):
        load_sharded(Policy, tmp_path, world.mesh)


def test_frequencies_in_an_old_file_are_ignored(tmp_path: Path, world: World) -> None:
    save_kind("llama-untied", tmp_path)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6))
    assert differing(load_sharded(Policy, tmp_path, world.mesh), tmp_path) == []


@pytest.mark.parametrize("damage", ["no file", "a file of the index is gone", "truncated"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, world: World, damage: str) -> None:
    save_kind("llama-untied", tmp_path, shard="20KB" if "index" in damage else "5GB")
    if damage == "no file":
        (tmp_path / SINGLE).unlink()
    elif damage == "truncated":
        (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:1000])
    else:
        next(iter(tmp_path.glob("*.safetensors"))).unlink()
    with pytest.raises(ModelFolderError, match=INDEX if damage == "no file" else r"safetensors cannot be read"):
        load_sharded(Policy, tmp_path, world.mesh)


@pytest.mark.parametrize("wrap", [Policy, Critic, RewardModel])
def test_no_tensor_stays_on_the_cpu_when_another_device_computes(
    wrap: Callable[[Any], Body], tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device in place of a GPU: heads that are made new and computed buffers go where files' tensors go."""
    lm, names = build(save_kind("llama-untied", tmp_path))
    model = wrap(lm)
    fill(model, lm, tmp_path, names, torch.device("meta"), torch.device("meta"))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name for name, tensor in tensors.items() if not tensor.is_meta} == set()
    batch = collate(make_units(random_samples(), 4096))
    model.read()
    out = model(batch.to(torch.device("meta")))  # a tensor of another device would be refused
    assert all(found.is_meta for found in (out if isinstance(out, tuple) else (out,)))


def test_with_offloaded_parameters_buffers_are_where_blocks_compute(tmp_path: Path, world: World) -> None:
    lm, names = build(save_kind("llama-untied", tmp_path))
    policy = Policy(lm)
    fill(policy, lm, tmp_path, names, torch.device("cpu"), torch.device("meta"))
    assert {p.device.type for p in policy.parameters()} == {"cpu"}
    assert {b.device.type for b in policy.buffers()} == {"meta"}
