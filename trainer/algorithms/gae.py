"""Generalized advantage estimation from a critic's values, and the loss of the critic (PPO)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
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


def gae(
    rewards_S: Tensor,
    values_S: Tensor,
    trajectories: Rows,
    gamma: float,
    lambda_: float,
    ends_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(S,) advantages A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t, and (S,) the critic's targets A_t + V_t.

    Time runs over the S steps of each trajectory: its loss tokens, or its turns. After the last one V is `ends_R`, (R,)
    by trajectory: the value of the state in which a limit ended the episode, and 0 at an episode's own end; None: 0
    everywhere. arXiv 1506.02438, eq. 16; "partial-episode bootstrapping", arXiv 1712.00378.
    """
    next_S = torch.zeros_like(values_S) if ends_R is None else trajectories.spread(ends_R)
    goes_on_S = trajectories.of_S[1:] == trajectories.of_S[:-1]
    next_S[:-1] = torch.where(goes_on_S, values_S[1:], next_S[:-1])
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
    ends: Sequence[float] | None = None,
) -> tuple[list[Float32], list[Float32]]:
    """For each trajectory, the advantages (T,) and the critic's targets (T,), from the critic's `values` (T,).

    Only loss tokens count; the others have 0. `costs` (T,) are subtracted from the rewards. `ends` are the values after
    the last tokens; None: 0. With `advantage_level: turn`, a turn is one step of time: its reward is that of its
    tokens, its value that of its first loss token, and all of its tokens have its advantage and target (Turn-PPO, arXiv
    2512.17008). `whiten` gives the advantages mean 0 and (population) deviation 1 over the batch's loss tokens; targets
    are computed before that.
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
        after = None if ends is None else torch.tensor(ends[part], dtype=torch.float64)
        given = (torch.from_numpy(rewards), torch.from_numpy(known), rows)
        how = (algorithm.gae_gamma, algorithm.gae_lambda, after)
        if algorithm.advantage_level == "turn":
            found = _by_turn(
                *given, np.concatenate([np.empty(0, np.int64), *(t.turn_ids[t.loss_mask] for t in chosen)]), *how
            )
        else:
            found = gae(*given, *how)
        cuts = np.cumsum(lengths)[:-1]
        advantages += np.split(found[0].numpy(), cuts)
        targets += np.split(found[1].numpy(), cuts)
    if algorithm.normalization == "whiten":
        advantages = [w.advantages for w in whitened([Weighed(a, np.ones_like(a)) for a in advantages], totals)]
    return _placed(trajectories, [by_sign(a, algorithm) for a in advantages]), _placed(trajectories, targets)


def _by_turn(
    rewards_S: Tensor,
    values_S: Tensor,
    trajectories: Rows,
    turns_S: npt.NDArray[np.integer[Any]],
    gamma: float,
    lambda_: float,
    ends_R: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`gae` over turns, at each token of a turn; `turns_S` has the number of each token's turn in its trajectory."""
    first_S = first_of_turns(trajectories.of_S, torch.from_numpy(turns_S))
    of_S = first_S.long().cumsum(0) - 1
    turns = Rows(of_S, int(first_S.sum()))
    of_trajectories = Rows(trajectories.of_S[first_S], trajectories.count)
    found = gae(turns.sums(rewards_S), values_S[first_S], of_trajectories, gamma, lambda_, ends_R)
    return turns.spread(found[0]), turns.spread(found[1])


def first_of_turns(trajectories_S: Tensor, turns_S: Tensor) -> Tensor:
    """(S,) bool, true for the first loss token of each turn: `turns_S` tells the turns of a trajectory apart."""
    first_S = torch.ones_like(turns_S, dtype=torch.bool)
    first_S[1:] = (trajectories_S[1:] != trajectories_S[:-1]) | (turns_S[1:] != turns_S[:-1])
    return first_S


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
