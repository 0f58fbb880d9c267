"""Reads tensors, optimizer moments and random states from a checkpoint: every rank its own part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from agentrl.errors import StoreError
from agentrl.trainer.checkpoints.checkpoint import STATE, Checkpoint
from agentrl.trainer.checkpoints.state_reader import StateReader
from agentrl.trainer.distributed import World
from agentrl.trainer.optimizer import Trainable, moments


def shapes(folder: Path, part: str) -> dict[str, torch.Size]:
    """The shapes of a part's tensors; empty where the checkpoint has no such part. Raises StoreError."""
    try:
        known = StateReader(folder / STATE).read_metadata().state_dict_metadata
    except OSError as error:
        raise StoreError(f"{folder / STATE} is damaged: {error!r}") from error
    prefix = f"{part}/"
    return {
        key.removeprefix(prefix): entry.size
        for key, entry in known.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def fill(folder: Path, part: str, targets: Mapping[str, Tensor], world: World) -> None:
    """Read this rank's parts of `targets` from the checkpoint's tensors of these names. Collective.

    Raises StoreError when a tensor has another shape.
    """
    known = shapes(folder, part)
    for name, tensor in targets.items():
        if known[name] != tensor.shape:
            raise StoreError(
                f"{folder}: {part}/{name} has shape {tuple(known[name])}, the model has {tuple(tensor.shape)}"
            )
    state = {f"{part}/{name}": tensor.detach() for name, tensor in targets.items()}
    load_state(state, storage_reader=StateReader(folder / STATE), process_group=world.files)


def load(found: Checkpoint, policy: Trainable, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Restore the policy's weights, its moments and the random states. Collective.

    Raises StoreError when the checkpoint was made with another model or another `train_layers`.
    """
    restore(found, "policy", policy, optimizer, world)
    size = shapes(found.folder, "rng").get(str(world.rank))  # None if the checkpoint was made with fewer ranks
    states = {} if size is None else {str(world.rank): torch.empty(size, dtype=torch.uint8)}
    fill(found.folder, "rng", states, world)
    for state in states.values():
        torch.set_rng_state(state)


def restore(found: Checkpoint, part: str, model: Trainable, optimizer: torch.optim.Optimizer, world: World) -> None:
    """Set a model's trained parameters and their AdamW moments from `part` and `part_optimizer`. Collective.

    Raises StoreError as `load` does.
    """
    weights, names = dict(model.trainable()), shapes(found.folder, part).keys()
    if names != weights.keys():
        raise StoreError(
            f"checkpoint {found.folder} holds {len(names)} trained tensors, this configuration trains "
            f"{len(weights)}: model, trainer.train_layers or trainer.lora changed"
        )
    fill(found.folder, part, weights, world)
    saved = shapes(found.folder, f"{part}_optimizer")
    for name, p in weights.items():
        if f"{name}/step" in saved:
            first, second = torch.zeros_like(p), torch.zeros_like(p)
            optimizer.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": first, "exp_avg_sq": second}
    fill(found.folder, f"{part}_optimizer", moments(model, optimizer), world)
