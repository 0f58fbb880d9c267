"""The reference policy: what the trained one is kept near.

It differs from the policy only in weights, so it needs no model of its own: it holds the shards that are other than the
policy's, and for its forward passes they change places. Layers that nobody trains exist once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from agentrl.errors import ModelFolderError
from agentrl.trainer import loading, naming
from agentrl.trainer.checkpoint import like
from agentrl.trainer.policy import Policy
from agentrl.trainer.sharding import reshard


class Reference:
    """Weights of an older policy, sharded as `policy`'s are: at first, its own of now."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        reshard(policy)
        self.tensors = {name: p.detach().clone() for name, p in policy.trainable()}

    @torch.no_grad()
    def overlay(self, folder: Path) -> None:
        """Take the tensors of a model folder, of a checkpoint or of a published version; others stay.

        Raises ModelFolderError when the folder holds none of the policy's, or one of another shape.
        """
        reshard(self._policy)
        lm, files = self._policy.lm, _tensor_files(folder)
        names = naming.match(lm, files, loading.known_names(lm))
        found = loading.given(names, files)
        taken = {name: p.detach().clone() for name, p in lm.named_parameters() if loading.stored_name(name) in found}
        if not taken:
            raise ModelFolderError(f"reference {folder} has none of the model's tensors")
        targets = {loading.stored_name(name): tensor for name, tensor in taken.items()}
        loading.read(files, names, targets, f"reference {folder}")
        self.tensors |= taken

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take whole tensors that a checkpoint kept."""
        for name, tensor in tensors.items():
            self.tensors[name] = like(tensor, self.tensors[name], f"reference {name}")

    def refresh(self) -> None:
        """Become the policy of now."""
        reshard(self._policy)
        with torch.no_grad():
            for name, p in self._policy.trainable():
                self.tensors[name].copy_(p)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Until the block ends the policy computes with these weights. Without gradients; no graph may be alive."""
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
    """Where each tensor is. A checkpoint has its moments beside its weights."""
    weights = folder / "weights.safetensors"
    paths = [weights] if weights.is_file() else sorted(folder.glob("*.safetensors"))
    return {name: path for path in paths for name in loading.tensor_names(path)}
