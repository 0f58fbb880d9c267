"""Which ranks share what. Ranks are numbered from the group that exchanges most to the one that exchanges least:

    tensor group    splits the products of a block; its ranks have the same tokens
    context group   splits the tokens of a microbatch; its ranks have the same microbatch
    expert group    splits the experts of a mixture; its ranks send each other tokens. Cuts across the other groups
    replica         shards the model; its context groups have different microbatches
    all ranks       the replicas

Eight ranks as two replicas, with context 2 and tensor 2; and four ranks of one replica, with experts 2:

    rank            0  1  2  3  4  5  6  7          rank            0  1  2  3
    replica         0  0  0  0  1  1  1  1          data rank       0  1  2  3
    data rank       0  0  0  0  1  1  1  1          has experts     0  1  0  1    (halves of them)
    context rank    0  0  1  1  0  0  1  1          shards with     2  3  0  1    (the same experts)
    tensor rank     0  1  0  1  0  1  0  1
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.errors import UserError


@dataclass(frozen=True, slots=True)
class Mesh:
    """How the ranks share a model. The first three are (shard,), or (replicate, shard) with several replicas."""

    whole: DeviceMesh  # shards tensors that a rank computes with whole: over all ranks of a replica
    split: DeviceMesh  # shards tensors that tensor parallelism has split: over the tensor groups of a replica
    owned: DeviceMesh | None = None  # shards the experts of a rank: over the expert groups of a replica
    tensor: DeviceMesh | None = None  # (tensor,): this rank's tensor group; none without tensor parallelism
    context: DeviceMesh | None = None  # (context,): this rank's context group; none without context parallelism
    experts: DeviceMesh | None = None  # (experts,): this rank's expert group; the tensor group unless it is larger

    @property
    def tensor_size(self) -> int:
        """Ranks of a tensor group."""
        return self.tensor.size() if self.tensor else 1

    @property
    def context_size(self) -> int:
        """Ranks of a context group."""
        return self.context.size() if self.context else 1

    @property
    def sharing(self) -> int:
        """Consecutive ranks that have the same microbatch."""
        return self.tensor_size * self.context_size

    @property
    def gradient_parts(self) -> int:
        """Ranks with different parts of a gradient: all but those of one tensor group, whose gradients are equal."""
        return self.whole.size() // self.tensor_size

    @property
    def spreads_experts(self) -> bool:
        """Whether an expert group is larger than a tensor group: the model must then be a mixture."""
        return self.experts is not None and self.experts is not self.tensor


def make_mesh(kind: str, size: int, *, replicas: int = 1, tensor: int = 1, context: int = 1, experts: int = 1) -> Mesh:
    """The mesh of `size` ranks on devices of this kind. Collective. Raises UserError where the numbers do not divide.

    The arguments are the keys of `resources.trainer`.
    """
    if size % (replicas * tensor * context):
        parts = f"replicas × tensor × context of resources.trainer = {replicas} × {tensor} × {context}"
        raise UserError(f"{size} ranks are not a multiple of {parts}")
    *copies, shards = (size,) if replicas == 1 else (replicas, size // replicas)
    if shards % experts or (experts % tensor and experts > 1):
        raise UserError(f"resources.trainer.experts {experts} must divide {shards} ranks, and be a multiple of tensor")
    names = ("replicate", "shard")[-1 - len(copies) :]
    split = whole = init_device_mesh(kind, (*copies, shards), mesh_dim_names=names)
    tensors = owners = owned = contexts = None
    if tensor > 1:
        cube = init_device_mesh(kind, (*copies, shards // tensor, tensor), mesh_dim_names=(*names, "tensor"))
        split, tensors = cube[names], cube["tensor"]
        owned, owners = split, tensors
    if context > 1:
        shape = (size // (context * tensor), context, tensor)
        contexts = init_device_mesh(kind, shape, mesh_dim_names=("data", "context", "tensor"))["context"]
    if experts > tensor:
        cube = init_device_mesh(kind, (*copies, shards // experts, experts), mesh_dim_names=(*names, "experts"))
        owned, owners = cube[names], cube["experts"]
    return Mesh(whole, split, owned, tensors, contexts, owners)
