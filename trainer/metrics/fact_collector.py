"""Facts of single tokens, measured in the pass that trains their trajectory: what the loss saw of each loss token, and
logprob and entropy of the other sampled tokens before the last one of them.

    Seen (a microbatch's tokens) ─► facts of each chosen trajectory, on this rank ─► of all ranks ─► the store

K: facts (`schemas.FACTS`), S: loss tokens of one microbatch, M: its masked outputs (masked_outputs.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import TokenFactsConfig
from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.schemas import FACTS, MASKED_FACTS, Float32, TokenFacts
from agentrl.trainer.algorithms.clipping import SURROGATES
from agentrl.trainer.algorithms.corrections import behavior_weights
from agentrl.trainer.algorithms.losses import LossTokens
from agentrl.trainer.algorithms.ratios import importance_ratio
from agentrl.trainer.distributed import World
from agentrl.trainer.nonfinite import Seen
from agentrl.trainer.packing import Sample


class FactCollector:
    """The facts of the `chosen` trajectories of one step, on this rank. `own_loss` says that a function of the user
    computes the loss: what only the algorithm's loss has is NaN then.
    """

    def __init__(self, chosen: Set[str], algorithm: Algorithm, *, own_loss: bool = False) -> None:
        self._chosen, self._algorithm, self._own_loss = chosen, algorithm, own_loss
        self._found: dict[str, TokenFacts] = {}

    def marked(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples; the update measures the masked outputs of the chosen ones."""
        return [replace(s, measured=s.tokens.trajectory_id in self._chosen) for s in samples]

    def add(self, seen: Iterable[Seen]) -> None:
        """Add the microbatches of a minibatch that has trained."""
        for one in seen:
            wanted = [(i, name) for i, name in enumerate(one.trajectory_ids) if name in self._chosen]
            if wanted:
                facts_KS = facts_of(one.tokens, self._algorithm, own_loss=self._own_loss).cpu().numpy()
                trained = _cut(facts_KS, one.tokens.trajectories.of_S, len(one.trajectory_ids))
                masked = [np.empty((len(MASKED_FACTS), 0), np.float32)] * len(one.trajectory_ids)
                if one.measured is not None:
                    facts_2M = torch.stack([one.measured.logprobs_M, one.measured.entropy_M]).cpu().numpy()
                    masked = _cut(facts_2M, one.measured.trajectories_M, len(one.trajectory_ids))
                self._found |= {name: TokenFacts(trained[i].copy(), masked[i].copy()) for i, name in wanted}

    def gathered(self, world: World) -> dict[str, TokenFacts]:
        """Trajectory → its facts, from all ranks. Collective."""
        found: dict[str, TokenFacts] = {}
        for theirs in world.everyones(self._found):
            found |= theirs
        return found


def chosen(batch: BatchOutline, config: TokenFactsConfig) -> set[str]:
    """The trajectories of a step whose facts are kept. Equal on every rank."""
    if not config.every or batch.step % config.every:
        return set()
    trained = sorted(one.trajectory_id for one in batch.trajectories if len(one.trained))
    if config.sample is None or config.sample >= len(trained):
        return set(trained)
    return set(random.Random(batch.step_id).sample(trained, config.sample))


def _cut(facts: Float32, of: Tensor, trajectories: int) -> list[Float32]:
    """The columns of each trajectory; `of` is the trajectory of each column, in ascending order."""
    starts = np.searchsorted(of.cpu().numpy(), np.arange(1, trajectories))
    return np.split(facts, starts, axis=1)


@torch.no_grad()
def facts_of(tokens: LossTokens, algorithm: Algorithm, *, own_loss: bool) -> Tensor:
    """(K, S) float32, the rows in the order of `FACTS`."""
    nothing_S = torch.full_like(tokens.logprobs_S, torch.nan)
    entropy_S = nothing_S if tokens.entropy_S is None else tokens.entropy_S
    facts = {
        "logprob": tokens.logprobs_S,
        "proximal_logprob": tokens.proximal_S,
        "entropy": entropy_S,
        "advantage": tokens.advantages_S,
        "teacher_logprob": nothing_S if tokens.teacher_S is None else tokens.teacher_S,
        "logprob_before": nothing_S if tokens.before_S is None else tokens.before_S,
    }
    if own_loss:
        facts |= dict.fromkeys(("ratio", "clipped", "weight", "capped"), nothing_S)
    else:
        of = (tokens.trajectories, tokens.turns)
        facts["ratio"] = importance_ratio(tokens.logprobs_S, tokens.proximal_S, *of, algorithm.ratio, tokens.keep_S)
        _, facts["clipped"] = SURROGATES[algorithm.clip](
            facts["ratio"], tokens.logprobs_S, tokens.advantages_S, tokens.trajectories, algorithm
        )
        weight_S, facts["capped"] = behavior_weights(tokens.proximal_S, tokens.behavior_S, *of, algorithm)
        facts["weight"] = weight_S / tokens.mean_weight
    facts["kept"] = torch.ones_like(tokens.logprobs_S) if tokens.keep_S is None else tokens.keep_S
    return torch.stack([facts[name].float() for name in FACTS])
