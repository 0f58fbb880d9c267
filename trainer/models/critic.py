"""The critic of PPO, and the advantages computed from its values.

The critic is a separate model with the policy's layout: the base model's body, the same number of trained layers, the
same sharding, and a linear head that starts at 0. A value belongs to the state that a token is sampled from, that is,
to all tokens before it. Samples that share those tokens share the value but have their own targets. H: hidden size;
other letters as in packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float32, Float64, TrajectoryTokens
from agentrl.trainer.algorithms.advantages import Weighed, overlong_penalties, own_returns, whitened
from agentrl.trainer.algorithms.gae import gae
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.models.policy import Body, decoder
from agentrl.trainer.packing import Microbatch, Sample


class Critic(Body):
    """The body of a causal LM, and a value head. Its forward is the FSDP root."""

    def __init__(self, lm: Any) -> None:
        super().__init__(decoder(lm))
        self.value = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, batch: Microbatch) -> Tensor:
        """(P,) float32, the value of the state before each predicted token."""
        self.count(batch, 0)
        return self.scalars(batch, self.value)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters of body and head by their names, in a fixed order."""
        yield from super().trainable()
        for name, parameter in self.value.named_parameters():
            yield f"value.{name}", parameter


@dataclass(frozen=True, slots=True)
class Learner:
    """A critic and its optimizer."""

    critic: Critic
    optimizer: torch.optim.Optimizer


def gae_advantages(
    trajectories: Sequence[TrajectoryTokens],
    algorithm: Algorithm,
    values: Sequence[Float32],
    costs: Sequence[Float32] | None = None,
) -> tuple[list[Float32], list[Float32]]:
    """For each trajectory, the advantages (T,) and the critic's targets (T,), from the critic's `values` (T,).

    Only loss tokens count; the others have 0. `costs` (T,) are subtracted from the rewards. `whiten` gives the
    advantages mean 0 and (population) deviation 1 over the batch's loss tokens; targets are computed before that.
    """
    penalties = overlong_penalties(trajectories, algorithm)
    advantages: list[Float64] = []
    targets: list[Float64] = []
    for i, t in enumerate(trajectories):
        rewards = token_rewards(t, algorithm, penalties)
        if costs is not None:
            rewards -= costs[i][t.loss_mask]
        rows = Rows(torch.zeros(len(rewards), dtype=torch.int64), 1)
        values_S = torch.from_numpy(values[i][t.loss_mask].astype(np.float64))
        found = gae(torch.from_numpy(rewards), values_S, rows, algorithm.gae_gamma, algorithm.gae_lambda)
        advantages.append(found[0].numpy())
        targets.append(found[1].numpy())
    if algorithm.normalization == "whiten":
        advantages = [w.advantages for w in whitened([Weighed(a, np.ones_like(a)) for a in advantages])]
    return _placed(trajectories, advantages), _placed(trajectories, targets)


def token_rewards(t: TrajectoryTokens, algorithm: Algorithm, penalties: Mapping[str, float]) -> Float64:
    """(S,) the reward of each loss token of a trajectory. The rewards from a turn to the end sum up to the turn's
    return.

    The last loss token of a turn gets its return minus that of the next turn with loss tokens. With `turn_discount` 1
    that is the reward between the two turns, wherever in the session's tree it was given.
    """
    turns = t.turn_ids[t.loss_mask]
    ends = np.flatnonzero(np.diff(turns, append=-1))
    returns = (own_returns(t, algorithm) + penalties[t.episode_id])[turns[ends]]
    rewards = np.zeros(len(turns), np.float64)
    rewards[ends] = returns - np.append(returns, 0.0)[1:]
    return rewards


def _placed(trajectories: Sequence[TrajectoryTokens], of_loss_tokens: Sequence[Float64]) -> list[Float32]:
    """(T,) per trajectory: the given numbers at loss tokens, 0 elsewhere."""
    out = []
    for t, numbers in zip(trajectories, of_loss_tokens, strict=True):
        placed = np.zeros(len(t.loss_mask), np.float32)
        placed[t.loss_mask] = numbers
        out.append(placed)
    return out


def explained_variance(samples: Sequence[Sample]) -> float:
    """1 − Var(target − value) / Var(target) over a batch's loss tokens: 1 is perfect, 0 or less is useless."""
    masks = [s.tokens.loss_mask for s in samples]
    values = np.concatenate([s.values[m] for s, m in zip(samples, masks, strict=True) if s.values is not None])
    targets = np.concatenate([s.targets[m] for s, m in zip(samples, masks, strict=True) if s.targets is not None])
    spread = float(targets.var(dtype=np.float64)) if len(targets) else 0.0
    return 1 - float((targets - values).var(dtype=np.float64)) / spread if spread else 0.0
