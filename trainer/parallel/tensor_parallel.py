"""Tensor parallelism: ranks with the same data split the matrix products of every block among them.

    x (whole) ─► q, k, v, gate, up: each rank computes some of the outputs ─► attention, activation: on those
              ─► o, down: each rank multiplies its part; the sum over ranks is whole again

transformers' plan for a model (`base_model_tp_plan` of its configuration) defines which modules are split and how; the
styles are PyTorch's. Every rank computes the embedding, the head and the norms between blocks whole.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from agentrl.errors import UserError
from agentrl.trainer.parallel.mesh import Mesh

COLUMNS: dict[str, dict[str, Any]] = {
    "colwise": {},
    "colwise_gather_output": {"output_layouts": Replicate()},
    "colwise_rep": {"output_layouts": Replicate()},
}
"""Styles that split a linear layer's outputs."""
ROWS: dict[str, dict[str, Any]] = {
    "rowwise": {},
    "rowwise_split_input": {"input_layouts": Replicate()},
    "rowwise_rep": {"input_layouts": Replicate()},
}
"""Styles that split a linear layer's inputs."""
HEADWISE = "replicated_with_grad_allreduce"
"""The style of a norm inside attention, which gets the heads of its rank only."""
HEADS_DIM = 2
"""The dimension of heads in such a norm's input: (1, N, heads, head size)."""
TENSOR_DIM = "tensor"
"""The mesh dimension over which blocks are split."""
SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Keys of a model's configuration that the number of ranks must divide."""


def parallelize(base: Any, model: str, mesh: DeviceMesh, elsewhere: Mapping[str, str] | None = None) -> None:
    """Split the blocks of `base`, the body of a `model`, over the ranks of `mesh`, in place; parameters may be on the
    meta device. What the plan `elsewhere` names is left out: another module shares it among the ranks.

    Raises UserError, which names resources.trainer.tensor, when transformers has no plan for the model, when PyTorch
    has no style for an entry of the plan, and when a size is not a multiple of the ranks.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # for DTensor developers
    found = list(_planned(base, model, elsewhere or {}))
    _check_sizes(base, found, mesh.size())
    trained = {name: parameter.requires_grad for name, parameter in base.named_parameters()}
    for name, style in found:
        for path, applied in _layers(base, name, style):
            parallelize_module(base.get_submodule(path), mesh, applied, src_data_rank=None)
    for name, parameter in base.named_parameters():
        parameter.requires_grad_(trained[name])


@torch.no_grad()
def average_replicated(model: nn.Module, mesh: Mesh) -> None:
    """Average over each tensor group the gradients of what its ranks hold alike inside blocks: norms, and biases that
    are added after a sum. Collective.

    Every rank of a group computes them from the same numbers, but a kernel that adds in any order may round
    differently, and ranks that update their copies by themselves would drift apart. The root's parameters are sharded
    over all ranks, which averages theirs.
    """
    if mesh.tensor is None:
        return
    own = [
        p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor) and _is_replicated(p.grad, mesh)
    ]
    if not own:
        return
    flat = torch.cat([grad.flatten() for grad in own])
    dist.all_reduce(flat, group=mesh.tensor.get_group())
    flat /= mesh.tensor.size()
    for grad, mean in zip(own, torch.split(flat, [grad.numel() for grad in own]), strict=True):
        grad.copy_(mean.view_as(grad))


def _is_replicated(grad: DTensor, mesh: Mesh) -> bool:
    """Whether the ranks of a tensor group have the same part of a gradient."""
    names = grad.device_mesh.mesh_dim_names or ()
    if TENSOR_DIM in names:
        return bool(grad.placements[names.index(TENSOR_DIM)].is_replicate())
    return grad.device_mesh == mesh.split


def generic(name: str) -> str:
    """The name of a module or parameter as plans have it: with `*` in place of numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _planned(base: Any, model: str, elsewhere: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The modules of a model's body that the plan splits, and their styles."""
    plan: dict[str, str] | None = base.config.base_model_tp_plan
    if not plan:
        raise UserError(f"resources.trainer.tensor: transformers has no tensor parallel plan for {model}; it must be 1")
    for name, found in (*base.named_modules(), *base.named_parameters()):
        style = plan.get(generic(name))
        if style is None or generic(name) in elsewhere or found is base.get_input_embeddings():
            continue
        layer = getattr(found, "base_layer", found)  # under an adapter
        if style != HEADWISE and (style not in COLUMNS | ROWS or not isinstance(layer, nn.Linear)):
            raise UserError(
                f"resources.trainer.tensor: the plan of {model} has {name} as {style!r}, which the trainer cannot do; "
                "it must be 1"
            )
        yield name, style


def _layers(base: nn.Module, name: str, style: str) -> Iterator[tuple[str, ParallelStyle]]:
    """The modules to split for one entry of the plan: a layer and, if it has an adapter, the part on the same side."""
    if style == HEADWISE:
        yield name, SequenceParallel(sequence_dim=HEADS_DIM, use_local_output=True)
        return
    columns = style in COLUMNS
    made = ColwiseParallel(**COLUMNS[style]) if columns else RowwiseParallel(**ROWS[style])
    if isinstance(base.get_submodule(name), nn.Linear):
        yield name, made
    else:
        yield f"{name}.base_layer", made
        yield f"{name}.lora_{'B' if columns else 'A'}.default", made


def _check_sizes(base: Any, planned: list[tuple[str, str]], ranks: int) -> None:
    sizes = {key: getattr(base.config, key, None) for key in SIZES}
    for name, style in planned:
        if style in COLUMNS | ROWS:
            layer = base.get_submodule(name)
            sizes[f"of {name}"] = layer.out_features if style in COLUMNS else layer.in_features
    known = {key: size for key, size in sizes.items() if isinstance(size, int)}
    for key, size in known.items():
        if size % ranks:
            common = math.gcd(*known.values())
            valid = [n for n in range(1, common + 1) if common % n == 0]
            near = [max(n for n in valid if n < ranks), *[n for n in valid if n > ranks][:1]]
            raise UserError(
                f"resources.trainer.tensor {ranks} does not divide the model's {key} {size}; "
                f"{' or '.join(map(str, near))} would"
            )
