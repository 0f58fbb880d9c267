"""The reference policy: what the trained one is kept near.

It differs from the policy only in weights, so it needs no model of its own: it holds the shards that are other than the
policy's, and for its forward passes they change places. Layers that nobody trains exist once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from agentrl.errors import ModelFolderError
from agentrl.trainer.checkpoint import like
from agentrl.trainer.loading import owned, stored_name
from agentrl.trainer.model import Policy, reshard


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
        parameters = {stored_name(name): (name, p) for name, p in self._policy.lm.named_parameters()}
        taken = 0
        for path in _tensor_files(folder):
            with safe_open(path, framework="pt") as file:
                for name in sorted(parameters.keys() & file.keys()):
                    own, parameter = parameters[name]
                    source, tensor = file.get_slice(name), parameter.detach().clone()
                    found, wanted = tuple(source.get_shape()), tuple(tensor.shape)
                    if found != wanted:
                        raise ModelFolderError(f"reference {folder}: {name} has shape {found}, the model {wanted}")
                    mine, part = owned(tensor)
                    if mine.numel():
                        mine.copy_(source[part])
                    self.tensors[own] = tensor
                    taken += 1
        if not taken:
            raise ModelFolderError(f"reference {folder} has none of the model's tensors")

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


def _tensor_files(folder: Path) -> list[Path]:
    """A checkpoint has its moments beside its weights."""
    weights = folder / "weights.safetensors"
    return [weights] if weights.is_file() else sorted(folder.glob("*.safetensors"))
