"""Computes advantages from returns, as pure functions of a whole batch: they do not depend on how it is cut.

Baselines use one return per episode, R_i, the return of its first main call. They never use one per path, so a session
that forked into several trajectories, or that had sub-agents, counts once. A turn's advantage compares its own return
with that baseline; with trajectory credit, it compares the episode's return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.batches.outline import Credited
from agentrl.domain.schemas import Float32, Float64, TrajectoryTokens
from agentrl.domain.ties import tied

Totals = Callable[[dict[str, float]], dict[str, float]]
"""Sums over all ranks, by name (`World.total`); every rank passes the same names."""

EPSILON = 1e-6
"""Added to standard deviations before dividing by them."""


def alone(values: dict[str, float]) -> dict[str, float]:
    """The `Totals` of a process that has the whole batch."""
    return values


def group_mean(returns: Float64) -> Float64:
    """(n,) mean(R) for every episode. DeepSeekMath, arXiv 2402.03300, section 4.1.2."""
    return np.full_like(returns, returns.mean())


def leave_one_out(returns: Float64) -> Float64:
    """(n,) for each episode the mean of the other R_j; n > 1. "Back to Basics", arXiv 2402.14740."""
    others: Float64 = (returns.sum() - returns) / (len(returns) - 1)
    return others


def no_baseline(returns: Float64) -> Float64:
    """(n,) zeros."""
    return np.zeros_like(returns)


BASELINES: dict[str, Callable[[Float64], Float64]] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "none": no_baseline,
}
"""For each value of `Algorithm.baseline`: the returns (n,) of a group's episodes → the baseline (n,) of each episode.
"""


def overlong_penalty(tokens: int, algorithm: Algorithm) -> float:
    """The number added to the return of an episode whose longest path has `tokens` sampled tokens.

    0 up to L − B, then −p (tokens − (L − B)) / B, and −p from L on. L: `overlong_tokens`, B: `overlong_buffer`, p:
    `overlong_penalty`. DAPO, arXiv 2503.14476, eq. 13, where p is 1.
    """
    if algorithm.overlong_tokens is None:
        return 0.0
    over = tokens - (algorithm.overlong_tokens - algorithm.overlong_buffer)
    return -algorithm.overlong_penalty * min(max(over / algorithm.overlong_buffer, 0.0), 1.0)


def turn_advantages(trajectories: Sequence[Credited], algorithm: Algorithm) -> list[Float32]:
    """Per trajectory of a whole batch, (n_turns,) advantages under a baseline that is not a critic.

    A = (R − baseline) / scale. The scale is 1, or the sample standard deviation of the returns of the group or batch.
    `whiten` gives A mean 0 and (population) deviation 1 over the batch's loss tokens (REINFORCE++, arXiv 2501.03262).
    Under a group's baseline, a group of equal returns (`ties.tied`) has advantage 0 before whitening, and a group of
    one episode has advantage 0 also after it.
    """
    comparisons = _compare(trajectories, overlong_penalties(trajectories, algorithm), algorithm)
    raw: list[Weighed] = []
    for t in trajectories:
        comparison = comparisons[t.episode_id]
        raw.append(Weighed(comparison.advantages(own_returns(t, algorithm)), t.turn_tokens, comparison.counts))
    if algorithm.normalization == "whiten":
        raw = whitened(raw)
    return [w.advantages.astype(np.float32) for w in raw]


def penalized_advantages(
    trajectories: Sequence[TrajectoryTokens],
    algorithm: Algorithm,
    costs: Sequence[Float32],
    batch: Sequence[Credited] | None = None,
    totals: Totals = alone,
) -> list[Float32]:
    """Per trajectory, (T,) advantages under returns minus `costs` (T,), which are given at loss tokens.

    A token's return loses the costs of this token and of those after it in its trajectory. With trajectory credit, and
    for baselines and scales, an episode's return loses the costs of all its tokens. Otherwise as `turn_advantages`.
    `batch` has the outlines of the whole batch where `trajectories` are one rank's share; None: they are all of it.
    Collective if `totals` is.
    """
    batch = trajectories if batch is None else batch
    penalties = overlong_penalties(batch, algorithm)
    charged = list(zip(trajectories, costs, strict=True))
    whole = dict.fromkeys(penalties, 0.0)
    for t, cost in charged:
        whole[t.episode_id] += float(cost[t.loss_mask].sum(dtype=np.float64))
    whole = totals(whole)
    comparisons = _compare(batch, {id_: penalties[id_] - whole[id_] for id_ in penalties}, algorithm)
    raw: list[Weighed] = []
    for t, cost in charged:
        comparison = comparisons[t.episode_id]
        own = np.zeros(len(t.turn_ids))
        own[t.loss_mask] = comparison.advantages(own_returns(t, algorithm))[t.turn_ids[t.loss_mask]]
        if algorithm.credit == "turn":
            ahead = np.cumsum(cost[t.loss_mask][::-1], dtype=np.float64)[::-1]
            own[t.loss_mask] += (whole[t.episode_id] - ahead) * comparison.factor
        raw.append(Weighed(own, t.loss_mask, comparison.counts))
    if algorithm.normalization == "whiten":
        raw = whitened(raw, totals)
    return [np.where(w.tokens, w.advantages, 0).astype(np.float32) for w in raw]


def overlong_penalties(trajectories: Sequence[Credited], algorithm: Algorithm) -> dict[str, float]:
    """Episode → `overlong_penalty` of its longest path."""
    lengths: dict[str, int] = {}
    for t in trajectories:
        lengths[t.episode_id] = max(lengths.get(t.episode_id, 0), t.sampled_tokens)
    return {episode: overlong_penalty(n, algorithm) for episode, n in lengths.items()}


def own_returns(trajectory: Credited, algorithm: Algorithm) -> Float64:
    """(n_turns,) the return of each turn under `credit`."""
    if algorithm.credit == "turn":
        return trajectory.turn_returns
    return np.full_like(trajectory.turn_returns, trajectory.episode_return)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The baseline of an episode's returns."""

    penalty: float  # added to its returns
    baseline: float
    factor: float  # by which differences of returns are multiplied
    counts: bool  # whether its group has another episode to compare with

    def advantages(self, returns: Float64) -> Float64:
        """(n,) the advantages of n returns of the episode."""
        return (returns + self.penalty - self.baseline) * self.factor


def _compare(
    trajectories: Sequence[Credited], penalties: Mapping[str, float], algorithm: Algorithm
) -> dict[str, Comparison]:
    """Episode → its comparison, with its penalty."""
    groups: dict[str, dict[str, float]] = {}
    for t in trajectories:
        groups.setdefault(t.group_id, {})[t.episode_id] = t.episode_return + penalties[t.episode_id]
    everything = np.array([value for episodes in groups.values() for value in episodes.values()])
    found: dict[str, Comparison] = {}
    for episodes in groups.values():
        baselines, factor = _against(np.array(list(episodes.values())), everything, algorithm)
        counts = not algorithm.is_group_relative or len(episodes) > 1
        for i, id_ in enumerate(episodes):
            found[id_] = Comparison(penalties[id_], float(baselines[i]), factor, counts)
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


@dataclass(frozen=True, slots=True)
class Weighed:
    """Advantages, and how much they count in the mean of a batch."""

    advantages: Float64  # (n,)
    tokens: npt.NDArray[Any]  # (n,) the number of loss tokens of each; for advantages of tokens, the loss mask
    compared: bool = True  # False for a group of one episode: they do not count


def whitened(batch: Sequence[Weighed], totals: Totals = alone) -> list[Weighed]:
    """The batch, whose advantages have mean 0 and (population) deviation 1 over loss tokens, of all ranks by `totals`.

    Advantages that are not `compared` do not enter the mean and the deviation, and become 0.
    """
    compared = [w for w in batch if w.compared]
    sums = {
        "n": float(sum(w.tokens.sum() for w in compared)),
        "sum": sum(float(w.tokens @ w.advantages) for w in compared),
    }
    sums = totals(sums)
    if not sums["n"]:
        return [replace(w, advantages=np.zeros_like(w.advantages)) for w in batch]
    mean = sums["sum"] / sums["n"]
    squares = totals({"squares": sum(float(w.tokens @ (w.advantages - mean) ** 2) for w in compared)})["squares"]
    deviation = (squares / sums["n"]) ** 0.5 + EPSILON
    return [
        replace(w, advantages=(w.advantages - mean) / deviation if w.compared else np.zeros_like(w.advantages))
        for w in batch
    ]


def token_advantages(trajectory: TrajectoryTokens, turns: Float32 | Float64) -> Float32:
    """(T,) each sampled token gets its turn's advantage, every other token 0."""
    sampled = trajectory.turn_ids >= 0
    out = np.zeros(len(trajectory.turn_ids), np.float32)
    out[sampled] = turns[trajectory.turn_ids[sampled]]
    return out
