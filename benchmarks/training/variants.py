"""Our step and a plain padded loop, on the same samples: recompute, then for each minibatch forward, backward, step.

B: rows, T: places of a row, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample
from agentrl.trainer.update import update_policy

from .batches import rows_within, split

ALGORITHM = Algorithm(preset="grpo", correction="none")
"""The objective that all variants compute: TRL corrects nothing when it samples itself."""

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all variants share."""

    model: Path
    minibatches: int = 2
    budget: int = 1024  # tokens of one forward pass
    group_size: int = 4
    bfloat16: bool = False
    keep_gathered: bool = False  # with several ranks
    make_optimizer: MakeOptimizer | None = None  # None: AdamW, as each variant makes it

    @property
    def trainer(self) -> TrainerConfig:
        """The settings as a configuration of our trainer."""
        return TrainerConfig(
            minibatches=self.minibatches,
            tokens_per_microbatch=self.budget,
            algorithm=ALGORITHM,
            dtype="bfloat16" if self.bfloat16 else "float32",
            keep_gathered=self.keep_gathered,
        )


class Variant(Protocol):
    """A model and its optimizer."""

    model: nn.Module  # its forward is one pass
    optimizer: torch.optim.Optimizer

    def update(self, samples: list[Sample]) -> float:
        """Make one step; returns its loss, the mean over the minibatches."""

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters."""

    def settings(self) -> dict[str, object]:
        """The variant's settings, for the notes of the report."""


class Ours:
    """`update_policy`, as the trainer's loop calls it."""

    def __init__(self, setting: Setting, world: World) -> None:
        self._config = setting.trainer
        self._world = world
        dtype = torch.bfloat16 if setting.bfloat16 else torch.float32
        self.model = load_sharded(Policy, setting.model, world.mesh, dtype=dtype, keep_gathered=setting.keep_gathered)
        self.optimizer = (
            setting.make_optimizer([p for _, p in self.model.trainable()])
            if setting.make_optimizer
            else make_optimizer(self.model, self._config)
        )

    def update(self, samples: list[Sample]) -> float:
        """See Variant."""
        return update_policy(self.model, self.optimizer, samples, 0, {0: 0}, self._config, self._world)["loss"]

    def weights(self) -> dict[str, Tensor]:
        """See Variant."""
        return {name: full(p).clone() for name, p in self.model.trainable()}

    def settings(self) -> dict[str, object]:
        """See Variant."""
        return {"tokens_per_microbatch": self._config.tokens_per_microbatch, "optimizer": "AdamW, fused"}


class Padded:
    """A plain loop in transformers: rows are padded on the right, and the longest row sets the width of its microbatch.

    The head computes logits of outputs only, from the first output place of the microbatch on.
    """

    def __init__(self, setting: Setting, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._setting = setting
        self._device = device
        model: Any = AutoModelForCausalLM.from_pretrained(
            setting.model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        ).eval()
        self.model = model.to(device)
        c = setting.trainer
        parameters = list(self.model.parameters())
        self.optimizer = (
            setting.make_optimizer(parameters)
            if setting.make_optimizer
            else torch.optim.AdamW(parameters, lr=c.lr, betas=c.betas, weight_decay=c.weight_decay, fused=True)
        )

    def update(self, samples: list[Sample]) -> float:
        """See Variant."""
        parts = [self._microbatches(part) for part in split(samples, self._setting.minibatches, self._setting.budget)]
        with torch.no_grad():
            before = [[self._logprobs(m) for m in part] for part in parts]
        loss_sum = 0.0
        for part, old in zip(parts, before, strict=True):
            rows = sum(len(m.ids_BT) for m in part)
            for m, old_BT in zip(part, old, strict=True):
                loss = clipped_loss(self._logprobs(m), old_BT, m) / rows
                loss.backward()
                loss_sum += float(loss.detach())
            nn.utils.clip_grad_norm_(self.model.parameters(), self._setting.trainer.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss_sum / len(parts)

    def weights(self) -> dict[str, Tensor]:
        """See Variant."""
        return {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def settings(self) -> dict[str, object]:
        """See Variant."""
        return {"attention": "sdpa", "padding": "right, per microbatch", "optimizer": "AdamW, fused"}

    def _microbatches(self, samples: list[Sample]) -> list[Rectangle]:
        width = max(len(s.tokens.input_ids) for s in samples)
        rows = rows_within(len(samples), width, self._setting.budget)
        return [rectangle(samples[i : i + rows], self._device) for i in range(0, len(samples), rows)]

    def _logprobs(self, m: Rectangle) -> Tensor:
        """(B, K) logprobs of the tokens at the last K places."""
        keep = m.loss_BK.shape[1]
        autocast: AbstractContextManager[object] = (
            torch.autocast(self._device.type, torch.bfloat16) if self._setting.bfloat16 else nullcontext()
        )
        with autocast:
            logits_BKV = self.model(
                input_ids=m.ids_BT, attention_mask=m.mask_BT, use_cache=False, logits_to_keep=keep + 1
            ).logits[:, :-1]
        targets_BK = m.ids_BT[:, -keep:]
        chosen_BK = logits_BKV.float().gather(-1, targets_BK[..., None]).squeeze(-1)
        return chosen_BK - logits_BKV.float().logsumexp(-1)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A padded microbatch. K: places from the first output on, the same for all rows."""

    ids_BT: Tensor  # int64
    mask_BT: Tensor  # int64, 0 in padding
    loss_BK: Tensor  # float32, 1 at outputs
    advantages_BK: Tensor  # float32


def rectangle(samples: Sequence[Sample], device: torch.device) -> Rectangle:
    """Pad on the right."""
    lengths = [len(s.tokens.input_ids) for s in samples]
    shape = (len(samples), max(lengths))
    ids, mask, loss, advantages = (np.zeros(shape, dtype) for dtype in (np.int64, np.int64, np.float32, np.float32))
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        ids[row, :length] = sample.tokens.input_ids
        mask[row, :length] = 1
        loss[row, :length] = sample.tokens.loss_mask
        advantages[row, :length] = sample.advantages
    first = int(loss.any(0).argmax())
    arrays = (ids, mask, loss[:, first:], advantages[:, first:])
    return Rectangle(*(torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays))


def clipped_loss(logprobs_BK: Tensor, old_BK: Tensor, m: Rectangle) -> Tensor:
    """Σ over rows of the mean over a row's outputs of −min(ρ A, clip(ρ) A)."""
    ratio_BK = torch.exp(logprobs_BK - old_BK)
    clipped_BK = ratio_BK.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
    loss_BK = -torch.min(ratio_BK * m.advantages_BK, clipped_BK * m.advantages_BK)
    return ((loss_BK * m.loss_BK).sum(1) / m.loss_BK.sum(1)).sum()
