"""Loads models sharded per block with FSDP2: each rank holds its part of the weights.

A single float32 rank needs no sharding and computes with the plain module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import ModelFolderError, UserError
from agentrl.trainer.attention import tree_attention
from agentrl.trainer.distributed import World
from agentrl.trainer.experts.routing_replay import routing_of
from agentrl.trainer.kernels import fused_norms
from agentrl.trainer.models import loading, lora, mechanisms, onednn, packing_probe
from agentrl.trainer.models.activations import Offload, checkpoint_trained
from agentrl.trainer.models.policy import Body, decoder
from agentrl.trainer.parallel import context_parallel, expert_parallel, tensor_parallel
from agentrl.trainer.parallel.mesh import Mesh
from agentrl.trainer.recurrence import carrying

AnyBody = TypeVar("AnyBody", bound=Body)


def load_sharded(
    wrap: Callable[[Any], AnyBody],
    folder: Path,
    mesh: Mesh,
    *,
    train_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
    activation_offload: bool = False,
    cpu_offload: bool = False,
    keep_gathered: bool = False,
    adapter: AdapterConfig | None = None,
    attention: Literal["auto", "split", "flex"] = "auto",
    replay_routing: bool = False,
    balance_routers: bool = False,
) -> AnyBody:
    """Build, freeze, wrap and shard a model, and load this rank's part. Collective.

    Master weights are float32; the forward pass computes in `dtype`.

    train_layers              only the top blocks and the final norm train; the autograd graph starts at the first
                              trained block, so no activations below it are kept
    activation_checkpointing  a trained block keeps only its input and is computed again in the backward pass
    activation_offload        that input waits in CPU memory
    keep_gathered             a block's gathered weights stay until `accumulate` releases them
    cpu_offload               parameters, gradients and moments stay in CPU memory; a GPU gets one block at a time
    adapter                   only the adapter trains, if its rank is not 0
    attention                 of packed sequences: in pieces, by FlexAttention, or chosen by the device
    replay_routing            a mixture's routers choose the experts that microbatches bring along
    balance_routers           a mixture's routers get a load-balancing loss

    The last two raise ModelFolderError for a model whose routers cannot be observed and replayed.

    With tensor ranks in the mesh, the tensors that they split are sharded over tensor groups, and with expert groups,
    experts over these; the others are sharded over all ranks.
    """
    device = mesh.whole.device_type
    if device == "cpu" and (cpu_offload or activation_offload):
        what = "cpu_offload moves parameters" if cpu_offload else "activation_offload moves activations"
        raise UserError(f"trainer.{what} off a GPU, and the trainer runs on the CPU")
    lm, names = loading.build(folder)
    lm.eval()  # no dropout: recomputed logprobs must be those of the policy that sampled
    if why := mechanisms.untrainable(lm):
        raise ModelFolderError(f"model folder {folder}: {type(lm).__name__}: {why}")
    if mechanisms.narrow_experts(lm, dtype):
        lm.set_experts_implementation(mechanisms.PLAIN)
    blocks = _blocks(lm)
    if train_layers is not None:
        _freeze_all_but_top(lm, blocks, train_layers)
    if adapter and adapter.rank:
        lora.attach(lm, adapter)
    routing = routing_of(blocks, replays=replay_routing, balances=balance_routers)
    carrying.carry(blocks)
    if activation_checkpointing:
        contexts = None if routing is None else routing.checkpoint_contexts
        checkpoint_trained(blocks, Offload() if activation_offload else None, contexts)
    experts = expert_parallel.spread(decoder(lm), type(lm).__name__, mesh)
    if mesh.tensor:
        elsewhere = expert_parallel.plan_of(decoder(lm)) if experts else {}
        tensor_parallel.parallelize(decoder(lm), type(lm).__name__, mesh.tensor, elsewhere)
    elif device == "cpu":
        onednn.adopt(lm)
    else:
        fused_norms.adopt(lm)
    model = wrap(lm)
    model.names, model.routing = names, routing
    model.attention = tree_attention.name_for(attention, device)
    if mesh.whole.size() > 1 or dtype != torch.float32 or cpu_offload:  # otherwise FSDP would only copy
        precision = partial(MixedPrecisionPolicy, param_dtype=dtype, reduce_dtype=torch.float32)
        shard: dict[str, Any] = {
            "mp_policy": precision(),
            "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        }
        # A rank that owns all shards would only copy when it gathers again for the backward pass.
        reshards = mesh.split.shape[-1] > 1 and not keep_gathered
        for owned in experts:
            # Routing weights may have another type than the blocks.
            as_given = shard | {"mp_policy": precision(cast_forward_inputs=False)}
            expert_parallel.shard(owned, mesh, mesh.gradient_parts, **as_given, reshard_after_forward=not keep_gathered)
        for block in blocks:
            fully_shard(block, **shard, mesh=mesh.split, reshard_after_forward=reshards)
        fully_shard(model, **shard, mesh=mesh.whole, reshard_after_forward=False)
    computes = torch.device(device)
    loading.fill(model, lm, folder, names, torch.device("cpu") if cpu_offload else computes, computes)
    if adapter and adapter.rank:
        lora.initialise(lm)
    register_fsdp_forward_method(model, "within")
    packing_probe.choose(model, folder, computes, dtype)
    reshard(model)
    if mesh.context:
        undivided = model.unpacked or ("it has layers that carry a state along them" if carrying.carriers(lm) else "")
        context_parallel.check(lm.config, undivided, mesh.context_size, mesh.tensor_size)
        model.context = mesh.context
    return model


def accumulate(model: Body, more: bool) -> None:
    """Prepare the next backward pass. `more`: other backward passes follow it before the update.

    With `more`, the next pass neither reduces gradients nor releases gathered weights.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not more)
        model.set_reshard_after_backward(not more)


def backward(model: Body, loss: Tensor, world: World, *, more: bool) -> None:
    """Backward pass of this rank's share of a loss. Collective.

    The loss is multiplied by the number of ranks with different parts of the gradient, because FSDP averages over them.
    While `more` passes follow before the update, gradients are not reduced and gathered weights stay.
    """
    accumulate(model, more)
    (loss * world.mesh.gradient_parts).backward()  # type: ignore[no-untyped-call]


def reshard(model: Body) -> None:
    """Release the gathered parameters that a forward pass leaves without a backward pass; only shards remain."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _blocks(lm: Any) -> nn.ModuleList:
    layers = getattr(decoder(lm), "layers", None) or getattr(decoder(lm), "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelFolderError(f"{type(lm).__name__}: no list of decoder blocks found to shard")
    return layers


def _freeze_all_but_top(lm: Any, blocks: nn.ModuleList, top: int) -> None:
    if top > len(blocks):
        raise ModelFolderError(f"trainer.train_layers is {top}, but the model has {len(blocks)} blocks")
    lm.requires_grad_(False)
    for block in blocks[len(blocks) - top :]:
        block.requires_grad_(True)
    norms = [m for name, m in decoder(lm).named_children() if "norm" in name or name == "ln_f"]
    for norm in norms:
        norm.requires_grad_(True)
