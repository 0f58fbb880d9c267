"""Blocks whose inputs wait in CPU memory learn the same; only those inputs are moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import random_samples
from torch import Tensor

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import UserError
from agentrl.trainer.distributed import World
from agentrl.trainer.models.activations import Offload, checkpoint_trained
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Microbatch, collate_share, make_units, plan


def batch() -> Microbatch:
    ((by_rank),) = plan(make_units(random_samples(), 10_000), ranks=1, minibatches=1, budget=10_000)
    (found,) = collate_share(by_rank, 0, 10_000)
    return found


def gradients(policy: Policy, m: Microbatch) -> dict[str, Tensor]:
    policy(m)[0].sum().backward()
    return {name: p.grad.clone() for name, p in policy.trainable() if p.grad is not None}


@pytest.mark.parametrize("train_layers", [None, 2])
def test_inputs_of_blocks_wait_elsewhere(tiny_model: Path, world: World, train_layers: int | None) -> None:
    m = batch()
    expected = gradients(load_sharded(Policy, tiny_model, world.mesh, train_layers=train_layers), m)
    policy = load_sharded(Policy, tiny_model, world.mesh, train_layers=train_layers)
    offload = Offload(least_bytes=1)
    checkpoint_trained(policy.blocks.layers, offload)
    found = gradients(policy, m)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert offload.moved_bytes == (train_layers or 3) * len(m.input_ids_N) * policy.lm.config.hidden_size * 4


def test_small_tensors_stay(tiny_model: Path, world: World) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh)
    offload = Offload()
    checkpoint_trained(policy.blocks.layers, offload)
    gradients(policy, batch())
    assert offload.moved_bytes == 0


def test_it_needs_a_gpu_and_checkpointing(tiny_model: Path, world: World) -> None:
    with pytest.raises(ValueError, match="activation_offload needs activation_checkpointing: true"):
        TrainerConfig(activation_offload=True)
    with pytest.raises(UserError, match="activation_offload moves activations off a GPU, and the trainer runs on the"):
        load_sharded(Policy, tiny_model, world.mesh, activation_checkpointing=True, activation_offload=True)
