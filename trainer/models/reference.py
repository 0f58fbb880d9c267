"""The reference policy. The KL penalty keeps the trained policy near it.

The reference differs from the policy only in weights, so it needs no model of its own. It holds its own copies of the
shards that differ, and swaps them with the policy's for its forward passes. Layers that are not trained exist once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from agentrl.errors import ModelFolderError
from agentrl.trainer.checkpoints import checkpoint, checkpoint_reader
from agentrl.trainer.distributed import World
from agentrl.trainer.models import loading, rank_parts, tensor_files, tensor_naming
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import reshard


class Reference:
    """Weights of an older policy, sharded as `policy` is. At first a copy of the policy's current weights."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        reshard(policy)
        self.tensors = {name: p.detach().clone() for name, p in policy.trainable()}

    @torch.no_grad()
    def overlay(self, folder: Path, world: World) -> None:
        """Replace tensors by those of a model folder, a checkpoint or a published version. Collective.

        Raises ModelFolderError when the folder has none of the policy's tensors, and ModelFolderError or StoreError
        when one has another shape.
        """
        reshard(self._policy)
        if (folder / checkpoint.STATE).is_dir():
            taken = self._own(checkpoint_reader.shapes(folder, "policy"), folder)
            checkpoint_reader.fill(folder, "policy", taken, world)
        else:
            lm, files = self._policy.lm, _tensor_files(folder)
            names = tensor_naming.match(lm, files, loading.known_names(lm))
            taken = self._own(loading.given(names, files), folder)
            targets = {loading.stored_name(name): tensor for name, tensor in taken.items()}
            rank_parts.read(files, names, targets, f"reference {folder}")
        self.tensors |= taken

    def _own(self, found: Collection[str], folder: Path) -> dict[str, Tensor]:
        """Copies of the policy's tensors that a folder has too, to be overwritten."""
        named = self._policy.lm.named_parameters()
        own = {name: p.detach().clone() for name, p in named if {name, loading.stored_name(name)} & set(found)}
        if not own:
            raise ModelFolderError(f"reference {folder} has none of the model's tensors")
        return own

    def refresh(self) -> None:
        """Copy the policy's current weights."""
        reshard(self._policy)
        with torch.no_grad():
            for name, p in self._policy.trainable():
                self.tensors[name].copy_(p)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the policy compute with these weights until the block ends. No autograd graph may be alive."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self._policy)
        for name, p in self._policy.lm.named_parameters():
            if name in self.tensors:
                own = p.detach().clone()
                p.copy_(self.tensors[name])
                self.tensors[name].copy_(own)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Maps every tensor of a folder to its file."""
    return {name: path for path in sorted(folder.glob("*.safetensors")) for name in tensor_files.tensor_names(path)}
