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
from agentrl.trainer.algorithms.anchors import step_scores
from agentrl.trainer.algorithms.baselines import EPSILON, baselines, standard_scores

Totals = Callable[[dict[str, float]], dict[str, float]]
"""Sums over all ranks, by name (`World.total`); every rank passes the same names."""


def alone(values: dict[str, float]) -> dict[str, float]:
    """The `Totals` of a process that has the whole batch."""
    return values


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

    A = c (R − baseline) / scale. The scale is 1, or the sample standard deviation of the returns of the group or batch.
    c is 1, or with `rescale_tied` episodes / episodes of groups that are not tied (GPG, arXiv 2504.02546).
    `whiten` gives A mean 0 and (population) deviation 1 over the batch's loss tokens (REINFORCE++, arXiv 2501.03262).
    Under a group's baseline, a group of equal returns (`ties.tied`) has advantage 0 before whitening, and a group of
    one episode has advantage 0 also after it. `per_reward` divides the rewards of each name by their own deviation,
    sums them up, and whitens (GDPO, arXiv 2601.05242).
    """
    comparisons = _compare(trajectories, overlong_penalties(trajectories, algorithm), algorithm)
    raw: list[Weighed] = []
    for t, steps in zip(trajectories, _of_steps(trajectories, algorithm), strict=True):
        comparison = comparisons[t.episode_id]
        own = comparison.advantages(own_returns(t, algorithm)) + steps
        raw.append(Weighed(own, t.turn_tokens, comparison.counts))
    if algorithm.normalization in ("whiten", "per_reward"):
        raw = whitened(raw)
    return [by_sign(w.advantages, algorithm).astype(np.float32) for w in raw]


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
    of_steps = dict(zip((t.trajectory_id for t in batch), _of_steps(batch, algorithm), strict=True))
    raw: list[Weighed] = []
    for t, cost in charged:
        comparison = comparisons[t.episode_id]
        own = np.zeros(len(t.turn_ids))
        of_turns = comparison.advantages(own_returns(t, algorithm)) + of_steps[t.trajectory_id]
        own[t.loss_mask] = of_turns[t.turn_ids[t.loss_mask]]
        if algorithm.credit == "turn":
            ahead = np.cumsum(cost[t.loss_mask][::-1], dtype=np.float64)[::-1]
            own[t.loss_mask] += (whole[t.episode_id] - ahead) * comparison.factor
        raw.append(Weighed(own, t.loss_mask, comparison.counts))
    if algorithm.normalization == "whiten":
        raw = whitened(raw, totals)
    return [np.where(w.tokens, by_sign(w.advantages, algorithm), 0).astype(np.float32) for w in raw]


def by_sign(advantages: Float64, algorithm: Algorithm) -> Float64:
    """(n,) advantages, those above 0 times `positive_weight`, the others times `negative_weight`.

    Positive and negative reinforcement apart: arXiv 2506.01347, whose W-REINFORCE weighs positive ones by 0.1.
    """
    if algorithm.positive_weight == algorithm.negative_weight == 1:
        return advantages
    weighed: Float64 = advantages * np.where(advantages > 0, algorithm.positive_weight, algorithm.negative_weight)
    return weighed


def overlong_penalties(trajectories: Sequence[Credited], algorithm: Algorithm) -> dict[str, float]:
    """Episode → `overlong_penalty` of its longest path."""
    lengths: dict[str, int] = {}
    for t in trajectories:
        lengths[t.episode_id] = max(lengths.get(t.episode_id, 0), t.sampled_tokens)
    return {episode: overlong_penalty(n, algorithm) for episode, n in lengths.items()}


def _of_steps(trajectories: Sequence[Credited], algorithm: Algorithm) -> list[Float64]:
    """Per trajectory, (n_turns,) what `step_weight` adds to the advantages."""
    if not algorithm.step_weight:
        return [np.zeros(len(t.turn_returns)) for t in trajectories]
    return [algorithm.step_weight * scores for scores in step_scores(trajectories)]


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
    lengths: dict[str, int] = {}
    greedy = {t.group_id: t.greedy_return for t in trajectories}
    for t in trajectories:
        groups.setdefault(t.group_id, {})[t.episode_id] = t.episode_return + penalties[t.episode_id]
        if algorithm.baseline == "length_weighted":
            lengths[t.episode_id] = lengths.get(t.episode_id, 0) + int(t.turn_tokens.sum())
    of_groups = {id_: np.array(list(episodes.values())) for id_, episodes in groups.items()}
    everything = np.array([value for returns in of_groups.values() for value in returns])
    rescale = _rescale(list(of_groups.values())) if algorithm.rescale_tied else 1.0
    found: dict[str, Comparison] = {}
    named = {t.episode_id: t.named_returns for t in trajectories} if algorithm.normalization == "per_reward" else {}
    for group_id, episodes in groups.items():
        if named:
            members = [{**named[id_], OVERLONG: penalties[id_]} for id_ in episodes]
            summed = _summed_scores(members, algorithm.reward_weights)
            counts = len(episodes) > 1
            found |= {
                id_: Comparison(penalties[id_], value - summed[i], rescale, counts)
                for i, (id_, value) in enumerate(episodes.items())
            }
            continue
        tokens = np.array([lengths.get(id_, 0) for id_ in episodes], np.float64)
        compared, factor = _against(of_groups[group_id], tokens, everything, algorithm, greedy[group_id])
        counts = not algorithm.is_group_relative or len(episodes) > 1
        for i, id_ in enumerate(episodes):
            found[id_] = Comparison(penalties[id_], float(compared[i]), factor * rescale, counts)
    return found


OVERLONG = "overlong"
"""The penalty of overlong episodes counts as a reward of this name."""


def _summed_scores(members: Sequence[Mapping[str, float]], weights: Mapping[str, float]) -> Float64:
    """(n,) Σ over names w (r − mean r) / std r within a group; a reward that an episode lacks is 0. A name whose
    rewards are equal adds nothing.
    """
    total = np.zeros(len(members))
    for name in sorted({name for member in members for name in member}):
        values = np.array([member.get(name, 0.0) for member in members], np.float64)
        total += weights.get(name, 1.0) * standard_scores(values)
    return total


def _rescale(groups: Sequence[Float64]) -> float:
    """All episodes, divided by those of groups that are not tied; 1 where all are tied."""
    differing = sum(len(returns) for returns in groups if not tied(returns.tolist()))
    return sum(map(len, groups)) / differing if differing else 1.0


def _against(
    returns: Float64, tokens: Float64, batch: Float64, algorithm: Algorithm, greedy: float | None
) -> tuple[Float64, float]:
    """(n,) baselines of a group's episodes, and the factor of their advantages; `greedy` is the greedy one's return."""
    if algorithm.is_group_relative and tied(returns.tolist()):  # also a group of one
        return returns, 0.0
    found = baselines(returns, tokens, algorithm, greedy)
    match algorithm.normalization:
        case "none" | "whiten" | "per_reward":
            return found, 1.0
        case "group_std":
            compared = returns
        case "batch_std":
            compared = batch
        case _:
            assert_never(algorithm.normalization)
    if tied(compared.tolist()):
        return found, 0.0
    return found, 1 / (float(compared.std(ddof=1)) + EPSILON)


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
