"""Loads models sharded per block with FSDP2: each rank holds its part of the weights.

A single float32 rank needs no sharding and computes with the plain module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
from torch.utils.checkpoint import checkpoint

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.errors import ModelFolderError, UserError
from agentrl.trainer.distributed import Mesh, World
from agentrl.trainer.kernels import fused_norms
from agentrl.trainer.models import loading, lora, mechanisms, onednn, packing_probe, tensor_parallel
from agentrl.trainer.models.policy import Body, decoder

AnyBody = TypeVar("AnyBody", bound=Body)


def load_sharded(
    wrap: Callable[[Any], AnyBody],
    folder: Path,
    mesh: Mesh,
    *,
    train_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
    cpu_offload: bool = False,
    keep_gathered: bool = False,
    adapter: AdapterConfig | None = None,
) -> AnyBody:
    """Build, freeze, wrap and shard a model, and load this rank's part. Collective.

    Master weights are float32; the forward pass computes in `dtype`.

    train_layers              only the top blocks and the final norm train; the autograd graph starts at the first
                              trained block, so no activations below it are kept
    activation_checkpointing  a trained block keeps only its input and is computed again in the backward pass
    keep_gathered             a block's gathered weights stay until `accumulate` releases them
    cpu_offload               parameters, gradients and moments stay in CPU memory; a GPU gets one block at a time
    adapter                   only the adapter trains, if its rank is not 0

    With tensor ranks in the mesh, the tensors that they split are sharded over tensor groups, the others over all
    ranks.
    """
    device = mesh.whole.device_type
    if cpu_offload and device == "cpu":
        raise UserError("trainer.cpu_offload moves parameters off a GPU, and the trainer runs on the CPU")
    lm, names = loading.build(folder)
    lm.eval()  # no dropout: recomputed logprobs must be those of the policy that sampled
    if why := mechanisms.untrainable(lm):
        raise ModelFolderError(f"model folder {folder}: {type(lm).__name__}: {why}")
    blocks = _blocks(lm)
    if train_layers is not None:
        _freeze_all_but_top(lm, blocks, train_layers)
    if adapter and adapter.rank:
        lora.attach(lm, adapter)
    if activation_checkpointing:
        _checkpoint_trained(blocks)
    if mesh.tensor:
        tensor_parallel.parallelize(lm, mesh.tensor)
    elif device == "cpu":
        onednn.adopt(lm)
    else:
        fused_norms.adopt(lm)
    model = wrap(lm)
    model.names = names
    if mesh.whole.size() > 1 or dtype != torch.float32 or cpu_offload:  # otherwise FSDP would only copy
        shard: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        }
        # A rank that owns all shards would only copy when it gathers again for the backward pass.
        reshards = mesh.split.shape[-1] > 1 and not keep_gathered
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

    The loss is multiplied by the number of data ranks, because FSDP averages gradients over them. While `more` passes
    follow before the update, gradients are not reduced and gathered weights stay.
    """
    accumulate(model, more)
    (loss * world.data_size).backward()  # type: ignore[no-untyped-call]


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


def _checkpoint_trained(blocks: nn.ModuleList) -> None:
    """Checkpoint activations inside FSDP's hooks, so that weights are gathered once for recomputation and backward."""
    for block in blocks:
        if any(p.requires_grad for p in block.parameters()):
            # There is no dropout, so no random state to restore.
            again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            block.forward = again
