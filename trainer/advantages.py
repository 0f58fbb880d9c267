"""Group-relative advantages: pure functions from returns to numbers.

Baselines use one return per episode, R_i, the return of its first main call; never one per path, so that a session
that forked into several trajectories, or that had sub-agents, counts once. A turn's advantage is its own return
against that baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentrl.schemas import Float32, TrajectoryTokens

Float64 = npt.NDArray[np.float64]
Estimator = Literal["grpo", "dr_grpo", "rloo"]
EPSILON = 1e-6


def grpo(returns: Float64) -> tuple[Float64, float]:
    """A = (R − mean(R)) / (std(R) + 1e-6), sample standard deviation over the group.

    DeepSeekMath, arXiv 2402.03300, section 4.1.
    """
    return np.full_like(returns, returns.mean()), float(returns.std(ddof=1)) + EPSILON


def dr_grpo(returns: Float64) -> tuple[Float64, float]:
    """A = R − mean(R), without the division by std. "Understanding R1-Zero-like training", arXiv 2503.20783."""
    return np.full_like(returns, returns.mean()), 1.0


def rloo(returns: Float64) -> tuple[Float64, float]:
    """A_i = R_i − mean of the other R_j (leave-one-out). "Back to Basics", arXiv 2402.14740, section 3.3."""
    n = len(returns)
    return (returns.sum() - returns) / (n - 1), 1.0


ESTIMATORS: dict[Estimator, Callable[[Float64], tuple[Float64, float]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
"""Each returns the baseline of every episode (n,) and the scale of the group: A = (R − baseline) / scale."""


def turn_advantages(trajectories: Sequence[TrajectoryTokens], estimator: Estimator) -> list[Float32]:
    """Per trajectory, (n_turns,) advantages. All zero in a group of one episode, or where all episodes tie."""
    returns: dict[str, dict[str, float]] = {}
    for t in trajectories:
        returns.setdefault(t.group_id, {})[t.episode_id] = t.episode_return
    baselines: dict[str, tuple[float, float]] = {}  # by episode: baseline, scale
    for episodes in returns.values():
        values = np.array(list(episodes.values()), np.float64)
        if values.min() == values.max():  # also a group of one
            continue
        baseline, scale = ESTIMATORS[estimator](values)
        for episode_id, b in zip(episodes, baseline, strict=True):
            baselines[episode_id] = (float(b), scale)
    out = []
    for t in trajectories:
        if t.episode_id in baselines:
            b, scale = baselines[t.episode_id]
            out.append(((t.turn_returns.astype(np.float64) - b) / scale).astype(np.float32))
        else:
            out.append(np.zeros(len(t.turn_returns), np.float32))
    return out


def token_advantages(trajectory: TrajectoryTokens, turns: Float32) -> Float32:
    """(T,) each sampled token gets its turn's advantage, every other token 0."""
    sampled = trajectory.turn_ids >= 0
    out = np.zeros(len(trajectory.turn_ids), np.float32)
    out[sampled] = turns[trajectory.turn_ids[sampled]]
    return out
