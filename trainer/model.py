"""The policy: any causal language model of transformers, sharded per block with FSDP2, asked for logprobs only.

One process runs the same code: its mesh has one rank. H: hidden size; other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from agentrl.errors import ModelFolderError
from agentrl.trainer import attention, onednn
from agentrl.trainer.attention import Rows, tree_mask
from agentrl.trainer.head import token_logprobs
from agentrl.trainer.packing import Microbatch


class Policy(nn.Module):
    """Wraps a causal LM. Its forward is the FSDP root: the body on packed rows, the head on the predictions only."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: Microbatch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(P,) logprobs at the recorded temperature and (P,) entropies of the microbatch's predictions."""
        head = self.lm.get_output_embeddings().weight
        rows = Rows(
            batch.nodes_BL, batch.homes_N, tree_mask(batch.ends_BL, head.dtype), int(batch.positions_N.max()) + 1
        )
        hidden_NH = self.lm.base_model(
            input_ids=batch.input_ids_N[None],
            position_ids=batch.positions_N[None],
            attention_mask=rows.mask_B1LL,  # used as it is: four dimensions tell transformers to build none
            use_cache=False,
            rows=rows,
        ).last_hidden_state[0]
        return token_logprobs(
            hidden_NH[batch.sources_P], head, batch.targets_P, batch.temperatures_P, entropy_gradient=entropy_gradient
        )

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters by their Hugging Face name, in a fixed order."""
        for name, parameter in self.lm.named_parameters():
            if parameter.requires_grad:
                yield name, parameter


def load_policy(
    folder: Path, mesh: DeviceMesh, *, train_layers: int | None = None, dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
) -> Policy:  # fmt: skip
    """Load, freeze, shard. Master weights are float32; `dtype` is what the forward computes in.

    With `train_layers` only the top blocks and the final norm train. The graph then starts at the first trained block:
    nothing below it asks for a gradient, so nothing below it is kept.

    With `activation_checkpointing` a trained block keeps its input only, and is computed again in the backward.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"model folder {folder} has no config.json")
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention.NAME, local_files_only=True
    ).eval()  # no dropout: the recomputed logprobs are of the policy that sampled
    _refuse_unsupported(lm, folder)
    blocks = _blocks(lm)
    if train_layers is not None:
        _freeze_all_but_top(lm, blocks, train_layers)
    if activation_checkpointing:
        _checkpoint_trained(blocks)
    if mesh.device_type == "cpu":
        onednn.adopt(lm)
    policy = Policy(lm)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # One rank owns everything anyway: gathering again for the backward would only copy.
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=mesh.size() > 1)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    return policy


def _blocks(lm: Any) -> nn.ModuleList:
    layers = getattr(lm.base_model, "layers", None) or getattr(lm.base_model, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelFolderError(f"{type(lm).__name__}: no list of decoder blocks found to shard")
    return layers


def _refuse_unsupported(lm: Any, folder: Path) -> None:
    """The head is applied by us: refuse models whose logits are more than hidden · weightᵀ."""
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(lm.config, key, None) not in (None, 1, 1.0):
            raise ModelFolderError(f"model folder {folder}: config key {key!r} is not supported by the trainer")
    if getattr(lm.get_output_embeddings(), "bias", None) is not None:
        raise ModelFolderError(f"model folder {folder}: an output head with a bias is not supported by the trainer")


def _freeze_all_but_top(lm: Any, blocks: nn.ModuleList, top: int) -> None:
    if top > len(blocks):
        raise ModelFolderError(f"trainer.train_layers is {top}, but the model has {len(blocks)} blocks")
    lm.requires_grad_(False)
    for block in blocks[len(blocks) - top :]:
        block.requires_grad_(True)
    norms = [m for name, m in lm.base_model.named_children() if "norm" in name or name == "ln_f"]
    for norm in norms:
        norm.requires_grad_(True)


def _checkpoint_trained(blocks: nn.ModuleList) -> None:
    """Inside FSDP's hooks: what is computed again finds the block's weights gathered, once, for its backward."""
    for block in blocks:
        if any(p.requires_grad for p in block.parameters()):
            # There is no dropout, so no random state to restore.
            again = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            block.forward = again
