"""Models whose files hold experts one by one: loaded, trained, published and exported like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders import save_kind
from safetensors.torch import load_file, save_file
from support import AGES, random_samples
from transformers import AutoModelForCausalLM
from version_setup import version

from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.errors import ModelFolderError
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.reference import Reference
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import collate, make_units
from agentrl.trainer.update import update_policy
from agentrl.trainer.weights import model_export
from agentrl.versions.weights_folder import TENSORS, checksum

KINDS = ("qwen3-experts", "mixtral")
EXPERT = {
    "qwen3-experts": "model.layers.2.mlp.experts.3.down_proj.weight",
    "mixtral": "model.layers.2.block_sparse_moe.experts.3.w2.weight",
}


def trained(folder: Path, world: World, adapter: LoraConfig | None = None) -> Policy:
    policy = load_sharded(Policy, folder, world.mesh, adapter=adapter)
    config = TrainerConfig(lr=1e-2)
    update_policy(policy, make_optimizer(policy, config), random_samples(), 1, AGES, config, world)
    return policy


@torch.no_grad()
def ours(policy: Policy) -> torch.Tensor:
    """Logprobs of all loss tokens, sample by sample."""
    parts = [collate(make_units([sample], 4096)) for sample in random_samples(7, groups=1)]
    return torch.cat([policy(m)[0][m.predictions_S] for m in parts])


@torch.no_grad()
def theirs(folder: Path) -> torch.Tensor:
    """The same by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for tokens in (sample.tokens for sample in random_samples(7, groups=1)):
        ids = torch.from_numpy(tokens.input_ids).long()
        logits = model(input_ids=ids[None]).logits[0, :-1] / torch.from_numpy(tokens.temperatures[1:, None])
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
        parts.append(logprobs[torch.from_numpy(tokens.loss_mask[1:])])
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_those_of_transformers(kind: str, tmp_path: Path, world: World) -> None:
    folder = save_kind(kind, tmp_path, shard="20KB")
    torch.testing.assert_close(ours(load_sharded(Policy, folder, world.mesh)), theirs(folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_and_versions_have_the_base_models_tensor_names(kind: str, tmp_path: Path, world: World) -> None:
    base = save_kind(kind, tmp_path / "base", shard="20KB")
    policy = trained(base, world)
    assert not torch.allclose(ours(policy), theirs(base), atol=1e-2)
    model_export.export(tmp_path, policy, base, LoraConfig(), world)
    torch.testing.assert_close(ours(policy), theirs(tmp_path / "model"), rtol=1e-5, atol=1e-5)
    whole = model_export.trainable(policy, world)
    named = {name for file in base.glob("*.safetensors") for name in load_file(file)}
    folder = version(policy, tmp_path / "v1", base, world).path
    assert load_file(folder / "model.safetensors").keys() == named
    rounded = version(policy, tmp_path / "v2", base, world, dtype=torch.bfloat16)
    assert checksum(rounded.path / TENSORS) == rounded.checksum
    sent = load_file(rounded.path / TENSORS)
    assert {(t.dtype, t.ndim > 1) for t in sent.values()} == {(torch.bfloat16, True), (torch.float32, False)}
    assert all(torch.equal(t.to(sent[name].dtype), sent[name]) for name, t in load_file(folder / TENSORS).items())
    reference = Reference(load_sharded(Policy, base, world.mesh))
    reference.overlay(folder, world)
    assert reference.tensors.keys() == whole.keys()
    assert all(torch.equal(full(reference.tensors[name]), whole[name]) for name in whole)


def test_adapters_of_layers_beside_experts_are_merged(tmp_path: Path, world: World) -> None:
    base = save_kind("mixtral", tmp_path / "base")
    adapter = LoraConfig(rank=2, targets=["q_proj"])
    policy = trained(base, world, adapter)
    model_export.export(tmp_path, policy, base, adapter, world)
    torch.testing.assert_close(ours(policy), theirs(tmp_path / "model"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_expert_is_named(kind: str, tmp_path: Path, world: World) -> None:
    save_kind(kind, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[EXPERT[kind]]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFolderError, match=r"model\.layers\.2\.mlp\.experts\.down_proj is 4 tensors, not 3"):
        load_sharded(Policy, tmp_path, world.mesh)
