"""Computes the models' logprobs and values of a batch before its update, and makes samples with advantages from them.

    trajectories ─► logprobs (policy, reference), values (critic) of every loss token ─► advantages ─► samples

Only the quantities that the algorithm needs are computed. Each rank computes a part and then gathers all of them, so
advantages do not depend on how the batch was cut. T, S: as in packing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float32, TrajectoryTokens
from agentrl.trainer.algorithms.advantages import penalized_advantages, token_advantages, turn_advantages
from agentrl.trainer.algorithms.kl import kl_divergence
from agentrl.trainer.algorithms.user_functions import AdvantageFunction, user_advantages
from agentrl.trainer.distributed import World
from agentrl.trainer.models.critic import gae_advantages
from agentrl.trainer.models.run_models import Models
from agentrl.trainer.models.sharding import reshard
from agentrl.trainer.packing import Microbatch, Sample, Unit, collate_share, make_units, plan

Scores = list[Float32]
"""(T,) per trajectory of a batch; 0 at tokens that are not loss tokens."""


def make_samples(
    trajectories: Sequence[TrajectoryTokens],
    algorithm: Algorithm,
    models: Models,
    budget: int,
    world: World,
    advantage: AdvantageFunction | None = None,
) -> list[Sample]:
    """A batch's trajectories with advantages, and with the logprobs and values that the update needs. Collective.

    `advantage` is the user's function, in place of the algorithm's estimator.
    """
    scorer = Scorer(trajectories, models.policy.budget(budget), world)
    reference = logprobs = values = targets = costs = None
    if algorithm.needs_reference:
        assert models.reference is not None
        with models.reference.in_place():
            reference = scorer.score(lambda m: models.policy(replace(m, routes=None))[0])  # routing_replay.py
        if algorithm.kl == "reward":
            logprobs = scorer.score(lambda m: models.policy(m)[0])
            reshard(models.policy)
            costs = [_cost(a, b, algorithm) for a, b in zip(logprobs, reference, strict=True)]
    if advantage is not None:
        function = advantage
        advantages = world.from_leader(lambda: user_advantages(function, trajectories, algorithm))
    elif algorithm.needs_critic:
        assert models.critic is not None
        values = scorer.score(models.critic.critic)
        reshard(models.critic.critic)
        advantages, targets = gae_advantages(trajectories, algorithm, values, costs)
    elif costs is not None:
        advantages = penalized_advantages(trajectories, algorithm, costs)
    else:
        turns = turn_advantages(trajectories, algorithm)
        advantages = [token_advantages(t, a) for t, a in zip(trajectories, turns, strict=True)]
    return [
        Sample(t, advantages[i], *(scores[i] if scores else None for scores in (logprobs, reference, values, targets)))
        for i, t in enumerate(trajectories)
    ]


def _cost(logprobs_T: Float32, reference_T: Float32, algorithm: Algorithm) -> Float32:
    """(T,) the KL penalty β · KL_t of each token; 0 where both logprobs are 0."""
    kl_T = kl_divergence(torch.from_numpy(logprobs_T), torch.from_numpy(reference_T), algorithm.kl_estimator)
    cost_T: Float32 = (algorithm.kl_coef * kl_T).numpy()
    return cost_T


class Scorer:
    """A batch's microbatches on this rank, made once, for several forward passes without gradients."""

    def __init__(self, trajectories: Sequence[TrajectoryTokens], budget: int, world: World) -> None:
        self._samples = [Sample(t, np.zeros(len(t.input_ids), np.float32)) for t in trajectories]
        self._budget, self._world = budget, world

    @cached_property
    def _planned(self) -> list[list[list[Unit]]]:
        """Units by rank and microbatch."""
        units = make_units(self._samples, self._budget)
        minibatches = plan(units, ranks=self._world.data_size, minibatches=1, budget=self._budget)
        return minibatches[0] if minibatches else [[]] * self._world.data_size

    @cached_property
    def _microbatches(self) -> list[Microbatch]:
        mine = collate_share(self._planned, self._world.data_rank, self._budget)
        return [m.to(self._world.device) for m in mine]

    @torch.no_grad()
    def score(self, model: Callable[[Microbatch], Tensor]) -> Scores:
        """The output of `model`, (P,) per prediction, at every loss token of the batch. Collective."""
        mine = [model(m)[m.predictions_S].float() for m in self._microbatches]
        joined = self._world.gather(torch.cat(mine) if mine else torch.empty(0)).numpy()
        at, found = 0, {}
        for sample in (s for rank in self._planned for units in rank for u in units for s in u.samples):
            mask = sample.tokens.loss_mask
            scores = found[id(sample)] = np.zeros(len(mask), np.float32)
            scores[mask] = joined[at : (at := at + int(mask.sum()))]
        return [found.get(id(s), s.advantages) for s in self._samples]
