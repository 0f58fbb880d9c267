"""SFT, DPO and reward modeling: the loss of each, computed from a microbatch.

S: loss tokens of one microbatch, N: its pairs. A pair's two samples are one unit, so they are the trajectories 2n and
2n + 1, in either order. Their advantages tell them apart (items.py).
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
import torch
from torch import Tensor

from agentrl.configs.trainer_config import AdapterConfig
from agentrl.configs.tuning_config import AnyConfig, DpoConfig, RewardModelConfig, SftConfig, TuningConfig
from agentrl.trainer.algorithms.losses import Sums
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.algorithms.preference import bradley_terry_losses, dpo_losses, ipo_losses
from agentrl.trainer.distributed import World
from agentrl.trainer.models import run_models
from agentrl.trainer.models.policy import Body, Policy
from agentrl.trainer.models.teacher import Recorded
from agentrl.trainer.packing import Microbatch, Sample, Unit, make_units
from agentrl.trainer.tuning import reward_model
from agentrl.trainer.tuning.items import Item
from agentrl.trainer.tuning.reward_model import RewardModel
from agentrl.trainer.weights import model_export


class Method(ABC):
    """One way to learn from items."""

    def wrap(self, lm: Any, config: TuningConfig) -> Body:
        """The model to train, around a causal LM."""
        return Policy(lm)

    def load(self, folder: Path, config: TuningConfig, world: World) -> Body:
        """The model to train, sharded, with the weights of `folder`."""
        return run_models.load(partial(self.wrap, config=config), folder, config.trainer, world)

    def prepared(self, item: Item) -> Item:
        """An item as the method packs it."""
        return item

    def units(self, items: Sequence[Item], budget: int) -> list[Unit]:
        """Units that are never cut: one per pair."""
        return [unit for item in items for unit in make_units(item, sys.maxsize)]

    def count(self, items: Sequence[Item]) -> int:
        """The number of pairs, over which the loss is a mean."""
        return len(items)

    @abstractmethod
    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """The sum of the losses over the tokens or pairs that `count` counts, and sums for the metrics."""

    def export(self, run_dir: Path, model: Body, base_model: Path, adapter: AdapterConfig, world: World) -> None:
        """Write `model/`, a whole Hugging Face folder, and a trained adapter to `adapter/`. Collective."""
        assert isinstance(model, Policy)
        model_export.export(run_dir, model, base_model, adapter, world)


@dataclass(frozen=True, slots=True)
class Sft(Method):
    """Cross-entropy, −log π of each trained token, or the divergence from its recorded distribution, averaged over the
    tokens of the batch.
    """

    compares: bool = False
    """Whether items have recorded distributions."""

    def units(self, items: Sequence[Item], budget: int) -> list[Unit]:
        """One tree per group, cut to the budget: the losses of tokens are independent."""
        return make_units([sample for item in items for sample in item], budget)

    def count(self, items: Sequence[Item]) -> int:
        """The number of trained tokens."""
        return sum(int(sample.tokens.loss_mask.sum()) for item in items for sample in item)

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums of −log π or divergences, of entropies, and of tokens with a recorded distribution."""
        likely = m.likely
        recorded = None
        if likely is not None:
            recorded = Recorded(likely.ids_QK, likely.logprobs_QK, likely.own_Q, likely.temperatures_Q)
        logprobs_P, entropy_P, *divergence = model(m, lesson=recorded)
        losses_S = -logprobs_P[m.predictions_S]
        sums: Sums = {"entropy": entropy_P[m.predictions_S].detach().double().sum()}
        if self.compares:
            sums["with_distribution"] = torch.zeros((), dtype=torch.float64, device=losses_S.device)
        if likely is not None:
            losses_S = losses_S.index_copy(0, likely.at_Q, divergence[0])
            sums["with_distribution"] += len(likely.at_Q)
        loss: Tensor = losses_S.sum() + 0.0 * logprobs_P.sum()
        return loss, sums | {"loss": loss.detach().double()}


@dataclass(frozen=True, slots=True)
class Dpo(Method):
    """DPO or IPO against the base model, whose logprobs `step.with_reference` writes to the samples' `logprobs`."""

    config: DpoConfig

    def prepared(self, item: Item) -> Item:
        """IPO divides the advantages of an answer by its number of tokens."""
        return [_per_token(sample) for sample in item] if self.config.loss_type == "ipo" else item

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums over pairs. The implicit reward of an answer is β times its log-ratio (arXiv 2305.18290, section 5)."""
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
    """Bradley–Terry: −log σ(r_w − r_l), arXiv 2203.02155, eq. 1."""

    def wrap(self, lm: Any, config: TuningConfig) -> Body:
        """A reward model with a new scalar head."""
        return RewardModel(lm, config.seed)

    def prepared(self, item: Item) -> Item:
        """One loss token after each answer, at which the reward is read."""
        return [reward_model.at_the_end(sample) for sample in item]

    def loss(self, model: Body, m: Microbatch) -> tuple[Tensor, Sums]:
        """Sums over pairs."""
        rewards_P = model(m)
        rewards_S = rewards_P[m.predictions_S]
        margins_N = pair_margins(m, rewards_S)
        losses_N = bradley_terry_losses(margins_N)
        return losses_N.sum() + 0.0 * rewards_P.sum(), pair_sums(losses_N, margins_N, m, rewards_S)

    def export(self, run_dir: Path, model: Body, base_model: Path, adapter: AdapterConfig, world: World) -> None:
        """Write transformers' sequence classifier with one label. Collective."""
        assert isinstance(model, RewardModel)
        reward_model.export(run_dir, model, base_model, adapter, world)


def method_of(config: AnyConfig) -> Method:
    """The method of a configuration."""
    match config:
        case SftConfig():
            return Sft(config.loss == "forward_kl")
        case DpoConfig():
            return Dpo(config)
        case RewardModelConfig():
            return RewardModeling()


def pair_margins(m: Microbatch, values_S: Tensor) -> Tensor:
    """(N,) sums of advantages times values over each pair: chosen minus rejected."""
    return Rows(m.trajectories_S // 2, m.sequences // 2).sums(m.advantages_S * values_S)


def pair_sums(losses_N: Tensor, margins_N: Tensor, m: Microbatch, values_S: Tensor) -> Sums:
    """Sums for the metrics of pairs: loss, accuracy, margin, and the rewards of each side."""
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
