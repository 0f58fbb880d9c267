"""Adapters: they alone train and are kept; merged, they are a model like any other; peft reads what is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_kind
from layouts import save
from safetensors.torch import load_file
from support import AGES, random_samples
from version_setup import version

from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.errors import UserError
from agentrl.trainer.checkpoints import checkpoint_reader, checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.critic import Critic
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Microbatch, collate, make_units
from agentrl.trainer.update import update_policy
from agentrl.trainer.weights import model_export
from agentrl.versions.weights_folder import ADAPTER as ADAPTER_TENSORS
from agentrl.versions.weights_folder import TENSORS, checksum

ADAPTER = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"])
CONFIG = TrainerConfig(lr=1e-2, lora=ADAPTER)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind("llama-untied", tmp_path_factory.mktemp("base"), shard="20KB")


@pytest.fixture(scope="module")
def trained(base: Path, world: World) -> tuple[Policy, torch.optim.Optimizer]:
    """A policy whose adapter has learned something."""
    policy = load_sharded(Policy, base, world.mesh, adapter=ADAPTER)
    optimizer = make_optimizer(policy, CONFIG)
    for seed in (0, 1):
        update_policy(policy, optimizer, random_samples(seed), 1, AGES, CONFIG, world)
    return policy, optimizer


def microbatch() -> Microbatch:
    return collate(make_units(random_samples(5), 4096))


def logprobs(policy: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = policy(microbatch())[0]
    return found


def test_a_new_adapter_changes_nothing_and_nothing_else_trains(base: Path, world: World) -> None:
    policy = load_sharded(Policy, base, world.mesh, adapter=ADAPTER)
    assert torch.equal(logprobs(policy), logprobs(load_sharded(Policy, base, world.mesh)))
    shapes = {name: tuple(p.shape) for name, p in policy.trainable()}
    assert len(shapes) == 2 * 2 * 3
    assert shapes["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == (4, 36)
    assert shapes["model.layers.2.mlp.down_proj.lora_B.default.weight"] == (36, 4)
    first = full(policy.lm.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight"))
    assert 0.1 < first.abs().max() * 6 <= 1  # uniform within 1 / sqrt(in)


def test_an_update_does_not_change_the_base_weights(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer]
) -> None:
    policy, _ = trained
    plain = load_sharded(Policy, base, world.mesh)
    assert (logprobs(policy) - logprobs(plain)).abs().max() > 0.01
    expected = {name: full(p) for name, p in plain.lm.named_parameters()}
    kept = {
        name.replace(".base_layer.", "."): full(p) for name, p in policy.lm.named_parameters() if "lora_" not in name
    }
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in expected)


def test_the_merged_model_computes_the_same_as_the_adapter(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer], tmp_path: Path
) -> None:
    policy, _ = trained
    model_export.export(tmp_path, policy, base, ADAPTER, world)
    torch.testing.assert_close(
        logprobs(load_sharded(Policy, tmp_path / "model", world.mesh)), logprobs(policy), rtol=1e-5, atol=1e-5
    )


def test_peft_reads_the_adapter_folder(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model_export.export(tmp_path, trained[0], base, ADAPTER, world)
    ours, lm = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (tmp_path / "model", base))
    theirs = PeftModel.from_pretrained(lm, str(tmp_path / "adapter")).merge_and_unload()
    changed = 0
    for (name, left), (_, right), original in zip(
        ours.named_parameters(),
        theirs.named_parameters(),
        load_sharded(Policy, base, world.mesh).lm.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7, msg=name)
        changed += not torch.equal(left, full(original))
    assert changed == 6


def test_engines_get_whole_matrices_and_a_folder_in_use_stays_unchanged(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer], tmp_path: Path
) -> None:
    made = version(trained[0], tmp_path / "v1", base, world, ADAPTER)
    folder, digest = made.path, made.checksum
    assert checksum(folder / TENSORS) == digest
    assert {name: tuple(t.shape) for name, t in load_file(folder / TENSORS).items()} == {
        f"model.layers.{i}.{layer}.weight": shape
        for i in range(3)
        for layer, shape in {"self_attn.q_proj": (36, 36), "mlp.down_proj": (36, 50)}.items()
    }
    before = folder.stat().st_ino
    again = version(trained[0], tmp_path / "v1", base, world, ADAPTER)
    assert (again.path, again.checksum, again.digests) == (folder, digest, made.digests)
    assert folder.stat().st_ino == before


def test_engines_get_zero_adapters_for_layers_fused_with_adapted_ones(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer], tmp_path: Path
) -> None:
    """SGLang fuses q, k and v: it takes an adapter for all of them or for none."""
    config = ADAPTER.model_copy(update={"publish": "adapter"})
    adapter = model_export.trainable(trained[0], world)
    made = model_export.adapter_version(tmp_path / "v1", adapter, base, config)
    folder, digest = made.path, made.checksum
    assert checksum(folder / ADAPTER_TENSORS) == digest
    sent = load_file(folder / ADAPTER_TENSORS)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", ADAPTER_TENSORS]
    layers = {"self_attn.q_proj": (36, 36), "self_attn.k_proj": (36, 12), "self_attn.v_proj": (36, 12)}
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == {
        f"base_model.model.model.layers.{i}.{layer}.lora_{part}.weight": (4, into) if part == "A" else (out, 4)
        for i in range(3)
        for layer, (into, out) in {**layers, "mlp.down_proj": (50, 36)}.items()
        for part in "AB"
    }
    changed = {name.split(".")[-3] for name, tensor in sent.items() if tensor.any()}
    assert changed == {"q_proj", "down_proj"}

    model_export.export(tmp_path, trained[0], base, config, world)
    merged, served = (_with_adapter(base, at) for at in (tmp_path / "adapter", folder))
    assert all(torch.equal(merged[name], tensor) for name, tensor in served.items())

    before = folder.stat().st_ino
    assert model_export.adapter_version(tmp_path / "v1", adapter, base, config) == made
    assert folder.stat().st_ino == before


def _with_adapter(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: dict[str, torch.Tensor] = PeftModel.from_pretrained(lm, str(adapter)).merge_and_unload().state_dict()
    return merged


def test_a_checkpoint_holds_and_restores_only_the_adapter(
    base: Path, world: World, trained: tuple[Policy, torch.optim.Optimizer], tmp_path: Path
) -> None:
    policy, optimizer = trained
    batch = TrainedBatch(step_id="s", digest="d", estimator="grpo", wasted_tokens=0, trained=[])
    record = StepRecord(step=1, version=1, batch=batch, metrics={})
    parts = checkpoint_writer.state_of("policy", policy, optimizer)
    saved = checkpoint_writer.begin(tmp_path, record, parts, world, copied=False).finish()
    assert checkpoint_reader.shapes(saved.folder, "policy").keys() == {name for name, _ in policy.trainable()}
    fresh = load_sharded(Policy, base, world.mesh, adapter=ADAPTER)
    checkpoint_reader.load(saved, fresh, make_optimizer(fresh, CONFIG), world)
    assert torch.equal(logprobs(fresh), logprobs(policy))


def test_a_critics_adapter_and_head_train(base: Path, world: World) -> None:
    critic = load_sharded(Critic, base, world.mesh, adapter=ADAPTER)
    trained = {name for name, _ in critic.trainable()}
    assert {name for name in trained if "lora_" not in name} == {"value.weight", "value.bias"}
    assert len(trained) == 2 + 2 * 2 * 3
    with torch.no_grad():
        assert not critic(microbatch()).any()  # a new one says 0


@pytest.mark.parametrize("target", ["q_porj", "lm_head", "embed_tokens"])
def test_a_target_that_is_not_a_linear_layer_is_named(base: Path, world: World, target: str) -> None:
    with pytest.raises(UserError, match=f"LlamaForCausalLM has no linear layer {target}"):
        load_sharded(Policy, base, world.mesh, adapter=LoraConfig(rank=4, targets=["q_proj", target]))


def test_experts_and_the_router_of_a_mixture_get_no_adapter(tmp_path: Path, world: World) -> None:
    policy = load_sharded(Policy, save("mixture", tmp_path), world.mesh, adapter=LoraConfig(rank=2))
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name, _ in policy.trainable()} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }


def test_all_linear_layers_except_the_head_get_an_adapter(base: Path, world: World) -> None:
    policy = load_sharded(Policy, base, world.mesh, adapter=LoraConfig(rank=2))
    assert len(list(policy.trainable())) == 2 * 7 * 3
