"""Generalized advantage estimation from a critic's values, and the loss of the critic (PPO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.batches.outline import Credited
from agentrl.domain.schemas import Float32, Float64, TrajectoryTokens
from agentrl.trainer.algorithms.advantages import (
    Totals,
    Weighed,
    alone,
    by_sign,
    overlong_penalties,
    own_returns,
    whitened,
)
from agentrl.trainer.algorithms.packed_rows import Rows, suffix_sums


def gae(rewards_S: Tensor, values_S: Tensor, trajectories: Rows, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """(S,) advantages A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t, and (S,) the critic's targets A_t + V_t.

    Time runs over a trajectory's loss tokens; V is 0 after the last one. arXiv 1506.02438, eq. 16.
    """
    next_S = torch.zeros_like(values_S)
    goes_on_S = trajectories.of_S[1:] == trajectories.of_S[:-1]
    next_S[:-1] = torch.where(goes_on_S, values_S[1:], 0.0)
    advantages_S = suffix_sums(rewards_S + gamma * next_S - values_S, trajectories, gamma * lambda_)
    return advantages_S, advantages_S + values_S


def value_losses(values_S: Tensor, old_values_S: Tensor, targets_S: Tensor, clip: float | None) -> Tensor:
    """(S,) ½ max((V − T)², (V_old + clip(V − V_old, ±ε) − T)²); without ε, only the first term.

    The clipped value loss of PPO's reference implementation (arXiv 1707.06347, eq. 9, has the squared error).
    """
    losses_S = (values_S - targets_S).square()
    if clip is not None:
        near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
        losses_S = torch.maximum(losses_S, (near_S - targets_S).square())
    return losses_S / 2


GAE_TOKENS = 1 << 22
"""Loss tokens that are computed at once."""


def gae_advantages(
    trajectories: Sequence[TrajectoryTokens],
    algorithm: Algorithm,
    values: Sequence[Float32],
    costs: Sequence[Float32] | None = None,
    batch: Sequence[Credited] | None = None,
    totals: Totals = alone,
) -> tuple[list[Float32], list[Float32]]:
    """For each trajectory, the advantages (T,) and the critic's targets (T,), from the critic's `values` (T,).

    Only loss tokens count; the others have 0. `costs` (T,) are subtracted from the rewards. `whiten` gives the
    advantages mean 0 and (population) deviation 1 over the batch's loss tokens; targets are computed before that.
    `batch` has the outlines of the whole batch where `trajectories` are one rank's share; None: they are all of it.
    Collective if `totals` is.
    """
    penalties = overlong_penalties(trajectories if batch is None else batch, algorithm)
    advantages: list[Float64] = []
    targets: list[Float64] = []
    for part in _chunks([int(np.count_nonzero(t.loss_mask)) for t in trajectories], GAE_TOKENS):
        chosen = trajectories[part]
        rewards = token_rewards(chosen, algorithm, penalties)
        if costs is not None:
            rewards -= np.concatenate([cost[t.loss_mask] for cost, t in zip(costs[part], chosen, strict=True)])
        known = np.concatenate([v[t.loss_mask] for v, t in zip(values[part], chosen, strict=True)], dtype=np.float64)
        lengths = [int(np.count_nonzero(t.loss_mask)) for t in chosen]
        rows = Rows(torch.from_numpy(np.repeat(np.arange(len(chosen)), lengths)), len(chosen))
        found = gae(torch.from_numpy(rewards), torch.from_numpy(known), rows, algorithm.gae_gamma, algorithm.gae_lambda)
        ends = np.cumsum(lengths)[:-1]
        advantages += np.split(found[0].numpy(), ends)
        targets += np.split(found[1].numpy(), ends)
    if algorithm.normalization == "whiten":
        advantages = [w.advantages for w in whitened([Weighed(a, np.ones_like(a)) for a in advantages], totals)]
    return _placed(trajectories, [by_sign(a, algorithm) for a in advantages]), _placed(trajectories, targets)


def _chunks(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of consecutive rows with at most `most` tokens together; a longer row is one by itself."""
    start = tokens = 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > most:
            yield slice(start, i)
            start, tokens = i, 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))


def token_rewards(
    trajectories: Sequence[TrajectoryTokens], algorithm: Algorithm, penalties: Mapping[str, float]
) -> Float64:
    """(S,) the reward of each loss token, one trajectory after another. The rewards from a turn to the end of its
    trajectory sum up to the turn's return.

    The last loss token of a turn gets its return minus that of the next turn with loss tokens. With `turn_discount` 1
    that is the reward between the two turns, wherever in the session's tree it was given.
    """
    first = np.cumsum([0, *(len(t.turn_returns) for t in trajectories)])  # number of turns before each trajectory
    of = [t.turn_ids[t.loss_mask] + n for t, n in zip(trajectories, first[:-1], strict=True)]
    turns = np.concatenate([np.empty(0, np.int64), *of])
    ends = np.flatnonzero(np.diff(turns, append=-1))
    returns = np.concatenate(
        [np.empty(0), *(own_returns(t, algorithm) + penalties[t.episode_id] for t in trajectories)]
    )[turns[ends]]
    owners = np.searchsorted(first, turns[ends], side="right")
    next_returns = np.where(np.append(owners[1:] == owners[:-1], False), np.append(returns[1:], 0.0), 0.0)
    rewards = np.zeros(len(turns), np.float64)
    rewards[ends] = returns - next_returns[: len(ends)]
    return rewards


def _placed(trajectories: Sequence[TrajectoryTokens], of_loss_tokens: Sequence[Float64]) -> list[Float32]:
    """(T,) per trajectory: the given numbers at loss tokens, 0 elsewhere."""
    out = []
    for t, numbers in zip(trajectories, of_loss_tokens, strict=True):
        placed = np.zeros(len(t.loss_mask), np.float32)
        placed[t.loss_mask] = numbers
        out.append(placed)
    return out
