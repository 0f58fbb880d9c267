"""Advantages of single steps: calls of a group that were made in the same state are compared with one another.

GiGPO, arXiv 2505.10978, section 4.2. Two calls are in the same state if their prompts have the same tokens, which their
digests say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from agentrl.domain.batches.outline import Credited
from agentrl.domain.schemas import Float64
from agentrl.domain.ties import tied

Anchor = tuple[str, str]
"""A group, and the digest of a prompt."""


def step_scores(trajectories: Sequence[Credited], epsilon: float) -> list[Float64]:
    """Per trajectory, (n_turns,) (R − mean R) / (std R + ε) of each call's return over the calls in its state; 0 for a
    call that is alone in its state, and where all returns are equal. A call that several paths share counts once.
    """
    known: dict[Anchor, dict[str, float]] = {}
    for anchor, call, value in _calls(trajectories):
        known.setdefault(anchor, {})[call] = value
    scales = {anchor: _scale(np.array(list(calls.values())), epsilon) for anchor, calls in known.items()}
    found = []
    for t in trajectories:
        scores = [(value - scales[anchor][0]) * scales[anchor][1] for anchor, _, value in _calls([t])]
        found.append(np.array(scores, np.float64))
    return found


def _calls(trajectories: Iterable[Credited]) -> Iterable[tuple[Anchor, str, float]]:
    for t in trajectories:
        for prompt, call, value in zip(t.prompts, t.calls, t.turn_returns.tolist(), strict=True):
            yield (t.group_id, prompt), call, value


def _scale(returns: Float64, epsilon: float) -> tuple[float, float]:
    """Their mean, and the factor of a difference from it."""
    if tied(returns.tolist()):
        return 0.0, 0.0
    return float(returns.mean()), 1 / (float(returns.std(ddof=1)) + epsilon)
