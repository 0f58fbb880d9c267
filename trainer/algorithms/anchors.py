"""Advantages of single steps: calls of a group that were made in the same state are compared with one another.

GiGPO, arXiv 2505.10978. Two calls are in the same state if their prompts have the same tokens, which their
digests say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from agentrl.domain.batches.outline import Credited
from agentrl.domain.schemas import Float64
from agentrl.trainer.algorithms.baselines import standard_scores

Anchor = tuple[str, str]
"""A group, and the digest of a prompt."""


def step_scores(trajectories: Sequence[Credited]) -> list[Float64]:
    """Per trajectory, (n_turns,) the standard score of each call's return over the calls in its state; 0 for a call
    that is alone in its state, and where all returns are equal. A call that several paths share counts once.
    """
    known: dict[Anchor, dict[str, float]] = {}
    for anchor, call, value in _calls(trajectories):
        known.setdefault(anchor, {})[call] = value
    scores = {
        anchor: dict(zip(calls, standard_scores(np.array(list(calls.values()))).tolist(), strict=True))
        for anchor, calls in known.items()
    }
    return [np.array([scores[anchor][call] for anchor, call, _ in _calls([t])], np.float64) for t in trajectories]


def _calls(trajectories: Iterable[Credited]) -> Iterable[tuple[Anchor, str, float]]:
    for t in trajectories:
        for prompt, call, value in zip(t.prompts, t.calls, t.turn_returns.tolist(), strict=True):
            yield (t.group_id, prompt), call, value
