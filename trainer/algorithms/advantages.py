"""Computes advantages from returns, as pure functions of a whole batch: they do not depend on how it is cut.

Baselines use one return per episode, R_i, the return of its first main call. They never use one per path, so a session
that forked into several trajectories, or that had sub-agents, counts once. A turn's advantage compares its own return
with that baseline; with trajectory credit, it compares the episode's return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import Float32, Float64, TrajectoryTokens
from agentrl.domain.ties import tied

EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""


def group_mean(returns: Float64) -> Float64:
    """mean(R). DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    return np.full_like(returns, returns.mean())


def leave_one_out(returns: Float64) -> Float64:
    """For each episode, the mean of the other R_j. "Back to Basics", arXiv 2402.14740."""
    others: Float64 = (returns.sum() - returns) / (len(returns) - 1)
    return others


def no_baseline(returns: Float64) -> Float64:
    """0."""
    return np.zeros_like(returns)


BASELINES: dict[str, Callable[[Float64], Float64]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}
"""By `Algorithm.baseline`: the returns (n,) of a group's episodes → the baseline (n,) of each episode."""


def overlong_penalty(tokens: int, algorithm: Algorithm) -> float:
    """The number added to the return of an episode whose longest path has `tokens` sampled tokens.

    0 up to L − B, then −p (tokens − (L − B)) / B, and −p from L on. DAPO, arXiv 2503.14476, eq. 13, where p is 1.
    """
    if algorithm.overlong_tokens is None:
        return 0.0
    over = tokens - (algorithm.overlong_tokens - algorithm.overlong_buffer)
    return -algorithm.overlong_penalty * min(max(over / algorithm.overlong_buffer, 0.0), 1.0)


def turn_advantages(trajectories: Sequence[TrajectoryTokens], algorithm: Algorithm) -> list[Float32]:
    """Per trajectory of a whole batch, (n_turns,) advantages under a baseline that is not a critic.

    A = (R − baseline) / scale. The scale is 1, or the sample standard deviation of the returns of the group or batch.
    `whiten` gives A mean 0 and (population) deviation 1 over the batch's loss tokens (REINFORCE++, arXiv 2501.03262).
    Under a group's baseline, a group of equal returns (`ties.tied`) has advantage 0 before whitening, and a group of
    one episode has advantage 0 also after it.
    """
    compared = _compare(trajectories, overlong_penalties(trajectories, algorithm), algorithm)
    raw = [c.turns for c in compared]
    if algorithm.normalization == "whiten":
        weights = [np.bincount(t.turn_ids[t.loss_mask], minlength=len(t.turn_returns)) for t in trajectories]
        raw = whitened(raw, weights, [c.counts for c in compared])
    return [a.astype(np.float32) for a in raw]


def penalized_advantages(
    trajectories: Sequence[TrajectoryTokens], algorithm: Algorithm, costs: Sequence[Float32]
) -> list[Float32]:
    """Per trajectory, (T,) advantages under returns minus `costs` (T,), which are given at loss tokens.

    A token's return loses the costs of this token and of those after it in its trajectory. With trajectory credit, and
    for baselines and scales, an episode's return loses the costs of all its tokens. Otherwise as `turn_advantages`.
    """
    penalties = overlong_penalties(trajectories, algorithm)
    whole = dict.fromkeys(penalties, 0.0)
    for t, cost in zip(trajectories, costs, strict=True):
        whole[t.episode_id] += float(cost[t.loss_mask].sum(dtype=np.float64))
    compared = _compare(trajectories, {id_: penalties[id_] - whole[id_] for id_ in penalties}, algorithm)
    raw: list[Float64] = []
    for t, c, cost in zip(trajectories, compared, costs, strict=True):
        own = np.zeros(len(t.turn_ids), np.float64)
        own[t.loss_mask] = c.turns[t.turn_ids[t.loss_mask]]
        if algorithm.credit == "turn":
            ahead = np.cumsum(cost[t.loss_mask][::-1], dtype=np.float64)[::-1]
            own[t.loss_mask] += (whole[t.episode_id] - ahead) * c.factor
        raw.append(own)
    if algorithm.normalization == "whiten":
        raw = whitened(raw, [t.loss_mask for t in trajectories], [c.counts for c in compared])
    return [np.where(t.loss_mask, a, 0).astype(np.float32) for t, a in zip(trajectories, raw, strict=True)]


def overlong_penalties(trajectories: Sequence[TrajectoryTokens], algorithm: Algorithm) -> dict[str, float]:
    """Episode → `overlong_penalty` of its longest path."""
    lengths: dict[str, int] = {}
    for t in trajectories:
        lengths[t.episode_id] = max(lengths.get(t.episode_id, 0), int((t.turn_ids >= 0).sum()))
    return {episode: overlong_penalty(n, algorithm) for episode, n in lengths.items()}


def own_returns(trajectory: TrajectoryTokens, algorithm: Algorithm) -> Float64:
    """(n_turns,) the return of each turn under `credit`."""
    if algorithm.credit == "turn":
        return trajectory.turn_returns
    return np.full(len(trajectory.turn_returns), trajectory.episode_return, np.float64)


@dataclass(frozen=True, slots=True)
class Compared:
    """A trajectory compared with its episode's baseline."""

    turns: Float64  # (n_turns,) advantages
    factor: float  # by which differences of returns were multiplied
    counts: bool  # whether its group had another episode to compare with


def _compare(
    trajectories: Sequence[TrajectoryTokens], penalties: Mapping[str, float], algorithm: Algorithm
) -> list[Compared]:
    groups: dict[str, dict[str, float]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, {})[t.episode_id] = t.episode_return + penalties[t.episode_id]
    everything = np.array([value for episodes in groups.values() for value in episodes.values()], np.float64)
    against: dict[str, tuple[float, float]] = {}  # by episode: baseline, factor
    for episodes in groups.values():
        baselines, factor = _against(np.array(list(episodes.values()), np.float64), everything, algorithm)
        against |= {id_: (float(b), factor) for id_, b in zip(episodes, baselines, strict=True)}
    found = []
    for t in trajectories:
        baseline, factor = against[t.episode_id]
        turns = (own_returns(t, algorithm) + penalties[t.episode_id] - baseline) * factor
        found.append(Compared(turns, factor, not algorithm.is_group_relative or len(groups[t.group_id]) > 1))
    return found


def _against(returns: Float64, batch: Float64, algorithm: Algorithm) -> tuple[Float64, float]:
    """(n,) baselines of a group's episodes, and the factor of their advantages."""
    if algorithm.is_group_relative and tied(returns.tolist()):  # also a group of one
        return returns, 0.0
    baselines = BASELINES[algorithm.baseline](returns)
    match algorithm.normalization:
        case "none" | "whiten":
            return baselines, 1.0
        case "group_std":
            compared = returns
        case "batch_std":
            compared = batch
        case _:
            assert_never(algorithm.normalization)
    if tied(compared.tolist()):
        return baselines, 0.0
    return baselines, 1 / (float(compared.std(ddof=1)) + EPSILON)


def whitened(
    advantages: Sequence[Float64], counts: Sequence[npt.NDArray[Any]], compared: Sequence[bool]
) -> list[Float64]:
    """The advantages with mean 0 and (population) deviation 1 over loss tokens.

    `counts` is the number of loss tokens of each advantage. Arrays that are not `compared` do not enter the mean and
    the deviation, and become 0.
    """
    weights = [n * float(c) for n, c in zip(counts, compared, strict=True)]
    n = sum(w.sum() for w in weights)
    if not n:
        return [np.zeros_like(a) for a in advantages]
    mean = sum(float(w @ a) for w, a in zip(weights, advantages, strict=True)) / n
    variance = sum(float(w @ (a - mean) ** 2) for w, a in zip(weights, advantages, strict=True)) / n
    return [
        (a - mean) / (variance**0.5 + EPSILON) if c else np.zeros_like(a)
        for a, c in zip(advantages, compared, strict=True)
    ]


def token_advantages(trajectory: TrajectoryTokens, turns: Float32 | Float64) -> Float32:
    """(T,) each sampled token gets its turn's advantage, every other token 0."""
    sampled = trajectory.turn_ids >= 0
    out = np.zeros(len(trajectory.turn_ids), np.float32)
    out[sampled] = turns[trajectory.turn_ids[sampled]]
    return out
