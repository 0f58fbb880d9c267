"""Expert parallelism: ranks own whole experts of a mixture, and send each other the tokens that chose them.

    router (on every rank) ─► all-to-all: a token to the owners of its experts ─► grouped products of the owned experts
                           ─► all-to-all: the outputs back ─► weighted sum on the token's rank

transformers' plan for a model (`base_model_ep_plan` of its configuration) names the fused experts, and its function
does the exchange. The ranks of a tensor group have the same tokens; each sends a part of them, so that no expert
computes a token twice. Experts are never split, so a tensor group shares them as an expert group does.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from agentrl.errors import UserError
from agentrl.trainer.parallel.mesh import Mesh
from agentrl.trainer.parallel.tensor_parallel import generic

DISPATCHED, OWNED = "ep_dispatch_experts", "grouped_gemm"
"""The styles of a plan's modules of experts, and of their parameters, whose first dimension is the expert."""
KEY = "resources.trainer.experts"


def plan_of(base: Any) -> dict[str, str]:
    """The plan for a model's body; empty when transformers has none by which ranks own whole experts."""
    plan: dict[str, str] = base.config.base_model_ep_plan or {}
    return dict(plan) if DISPATCHED in plan.values() and set(plan.values()) == {DISPATCHED, OWNED} else {}


def spread(base: Any, model: str, mesh: Mesh) -> list[nn.Module]:
    """Give every rank of an expert group its experts of `base`, the body of a `model`, in place; parameters may be on
    the meta device. Returns the modules of experts; none for a model without experts in a tensor group.

    Raises UserError, which names the key, for a model that is no such mixture, and when the experts cannot be divided.
    """
    if mesh.experts is None:
        return []
    plan = plan_of(base)
    found = [module for name, module in base.named_modules() if plan.get(generic(name)) == DISPATCHED]
    if mesh.spreads_experts and not found:
        raise UserError(f"{KEY}: transformers has no expert parallel plan for {model}; it must be 1")
    for module in found:
        _check(module, model, mesh.experts, KEY if mesh.spreads_experts else "resources.trainer.tensor")
    if found:
        _apply(base, mesh.experts, mesh.tensor, plan)
    return found


def _apply(base: Any, experts: DeviceMesh, tensor: DeviceMesh | None, plan: dict[str, str]) -> None:
    try:
        from transformers.distributed.tensor_parallel import apply_expert_parallelism
    except ImportError as error:
        raise UserError(f"{KEY} needs a newer transformers: pip install -U 'agentrl[trainer]'") from error
    apply_expert_parallelism(base, experts, tensor, plan)


def _check(module: nn.Module, model: str, mesh: DeviceMesh, key: str) -> None:
    for parameter in module.parameters(recurse=False):
        experts, ranks = parameter.shape[0], mesh.size()
        if experts % ranks:
            valid = [n for n in range(1, experts + 1) if experts % n == 0]
            near = [max(n for n in valid if n < ranks), *[n for n in valid if n > ranks][:1]]
            raise UserError(
                f"{key} {ranks} does not divide the {experts} experts of {model}; {' or '.join(map(str, near))} would"
            )


def shard(experts: nn.Module, mesh: Mesh, gradient_parts: int, **settings: Any) -> None:
    """Shard a rank's experts over the ranks of its replica that own the same ones. Before the block that has them.

    An owner's gradient is already the sum over its expert group's tokens, so it is divided by all `gradient_parts`.
    """
    assert mesh.owned is not None
    shards = mesh.owned.shape[-1]

    def placement(parameter: nn.Parameter) -> Shard | None:
        """By expert; by the next dimension where that has a part for every rank and the experts do not."""
        owned = parameter.shape[0] // (mesh.experts.size() if mesh.experts else 1)
        return Shard(1) if owned < shards and parameter.ndim > 1 and parameter.shape[1] % shards == 0 else None

    fully_shard(experts, mesh=mesh.owned, shard_placement_fn=placement, **settings)
    assert isinstance(experts, FSDPModule)
    experts.set_gradient_divide_factor(float(gradient_parts))
    if mesh.owned.device_type == "cpu" and shards > 1:  # gloo cannot divide; torch would divide one shard twice
        experts.set_force_sum_reduction_for_comms(True)
