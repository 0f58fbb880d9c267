"""What the three methods make of a microbatch: the loss of each token or pair, with the trainer's own tensors.

S: loss tokens of one microbatch, N: its pairs. A pair's two samples are one unit, so they are neighbours: trajectories
2n and 2n + 1, in either order; their advantages tell them apart (items.py).
"""

from __future__ import annotations

import dataclasses
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.configs.tuning_config import AnyConfig, DpoConfig, RewardModelConfig, SftConfig, TuningConfig
from agentrl.trainer.algorithms.losses import Sums
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.algorithms.preference import bradley_terry_losses, dpo_losses, ipo_losses
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.packing import Microbatch, Sample, Unit, make_units
from agentrl.trainer.publish import weights
from agentrl.trainer.tuning import reward_model
from agentrl.trainer.tuning.items import Item
from agentrl.trainer.tuning.reward_model import RewardModel


class Method(ABC):
    """One way to learn from items."""

    def wrap(self, lm: Any, config: TuningConfig) -> Body:
        """The model that is trained, around a causal LM."""
        return Policy(lm)

    def load(self, folder: Path, config: TuningConfig, world: World) -> Body:
        """The model that is trained, sharded, on the weights of `folder`."""
        return run_models.load(partial(self.wrap, config=config), folder, config.trainer, world)

    def prepared(self, item: Item) -> Item:
        """An item as it is packed."""
        return item

    def units(self, items: Sequence[Item], budget: int) -> list[Unit]:
        """What may not be cut: pairs, each by itself."""
        return [unit for item in items for unit in make_units(item, sys.maxsize)]

    def count(self, items: Sequence[Item]) -> int:
        """What the loss is a mean over: pairs."""
        return len(items)

    @abstractmethod
    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """The sum of the losses of all that is counted, and sums for the metrics."""

    def export(self, run_dir: Path, model: Body, base_model: Path, adapter: AdapterConfig, world: World) -> None:
        """Write `model/`, a whole Hugging Face folder, and of a trained adapter `adapter/`. Collective."""
        assert isinstance(model, Policy)
        weights.export(run_dir, model, base_model, adapter, world)


class Sft(Method):
    """−log π of each trained token, mean over the tokens of the batch."""

    def units(self, items: Sequence[Item], budget: int) -> list[Unit]:
        """One tree per group, cut to the budget: tokens do not depend on each other."""
        return make_units([sample for item in items for sample in item], budget)

    def count(self, items: Sequence[Item]) -> int:
        """Trained tokens."""
        return sum(int(sample.tokens.loss_mask.sum()) for item in items for sample in item)

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums of −log π, and of entropies."""
        logprobs_P, entropy_P = model(m)
        loss: Tensor = -logprobs_P[m.predictions_S].sum() + 0.0 * logprobs_P.sum()
        return loss, {"loss": loss.detach().double(), "entropy": entropy_P[m.predictions_S].detach().double().sum()}


@dataclass(frozen=True, slots=True)
class Dpo(Method):
    """DPO or IPO against the base model, whose log-probabilities are in the samples' `logprobs` (reference.py)."""

    config: DpoConfig

    def prepared(self, item: Item) -> Item:
        """With IPO the advantages of an answer are divided by its tokens."""
        return [_per_token(sample) for sample in item] if self.config.loss_type == "ipo" else item

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums over pairs; the implicit reward of an answer is β times its log-ratio."""
        logprobs_P, _ = model(m)
        log_ratio_S = logprobs_P[m.predictions_S] - m.behavior_S
        margins_N = pair_margins(m, log_ratio_S)
        if self.config.loss_type == "ipo":
            losses_N = ipo_losses(margins_N, self.config.beta)
        else:
            losses_N = dpo_losses(margins_N, self.config.beta, self.config.label_smoothing)
        loss = losses_N.sum() + 0.0 * logprobs_P.sum()
        return loss, pair_sums(losses_N, self.config.beta * margins_N, m, self.config.beta * log_ratio_S)


class RewardModeling(Method):
    """Bradley–Terry: −log σ(r_w − r_l)."""

    def wrap(self, lm: Any, config: TuningConfig) -> Body:
        """With a new scalar head."""
        return RewardModel(lm, config.seed)

    def prepared(self, item: Item) -> Item:
        """One loss token behind each answer: its reward is read where it would be predicted."""
        return [reward_model.at_the_end(sample) for sample in item]

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums over pairs."""
        rewards_P = model(m)
        rewards_S = rewards_P[m.predictions_S]
        margins_N = pair_margins(m, rewards_S)
        losses_N = bradley_terry_losses(margins_N)
        return losses_N.sum() + 0.0 * rewards_P.sum(), pair_sums(losses_N, margins_N, m, rewards_S)

    def export(self, run_dir: Path, model: Body, base_model: Path, adapter: AdapterConfig, world: World) -> None:
        """Folders of transformers' sequence classifier with one label."""
        assert isinstance(model, RewardModel)
        reward_model.export(run_dir, model, base_model, adapter, world)


def method_of(config: AnyConfig) -> Method:
    """The method that a configuration is of."""
    match config:
        case SftConfig():
            return Sft()
        case DpoConfig():
            return Dpo(config)
        case RewardModelConfig():
            return RewardModeling()


def pair_margins(m: Microbatch, values_S: Tensor) -> Tensor:
    """(N,) sums of values times advantages over each pair: what the chosen has more than the rejected."""
    return Rows(m.trajectories_S // 2, m.sequences // 2).sums(m.advantages_S * values_S)


def pair_sums(losses_N: Tensor, margins_N: Tensor, m: Microbatch, values_S: Tensor) -> Sums:
    """Sums for the metrics of pairs: loss, accuracy, margin, and the rewards of either side."""
    parts_S = (m.advantages_S.abs() * values_S).detach().double()
    return {
        "loss": losses_N.detach().double().sum(),
        "accuracy": (margins_N > 0).double().sum(),
        "margin": margins_N.detach().double().sum(),
        "reward_chosen": parts_S[m.advantages_S > 0].sum(),
        "reward_rejected": parts_S[m.advantages_S < 0].sum(),
    }


def _per_token(sample: Sample) -> Sample:
    tokens = np.float32(max(1, int(sample.tokens.loss_mask.sum())))
    return dataclasses.replace(sample, advantages=sample.advantages / tokens)
