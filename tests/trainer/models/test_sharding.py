"""What a sharded policy costs, and what is refused. What it computes: test_invariance.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import random_samples

from agentrl.errors import UserError
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.packing import Microbatch, collate, make_units


def microbatch(seed: int = 0) -> Microbatch:
    return collate(make_units(random_samples(seed), 4096))


def kept_bytes(policy: Policy, batch: Microbatch) -> int:
    """Of activations that the graph holds on to between forward and backward."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in map(full, policy.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = policy(batch)
    del held
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def test_activation_checkpointing_keeps_fewer_activations(tiny_model: Path, world: World) -> None:
    plain = load_sharded(Policy, tiny_model, world.mesh)
    again = load_sharded(Policy, tiny_model, world.mesh, activation_checkpointing=True)
    assert kept_bytes(again, microbatch()) < kept_bytes(plain, microbatch()) / 2


def test_cpu_offload_needs_a_gpu(tiny_model: Path, world: World) -> None:
    with pytest.raises(UserError, match=r"trainer\.cpu_offload"):
        load_sharded(Policy, tiny_model, world.mesh, cpu_offload=True)
