"""A batch with all that makes packing hard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import load_plain, padded_logprobs
from support import VOCABULARY, random_trajectory

from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.algorithms.advantages import token_advantages
from agentrl.trainer.packing import Sample


def long_tailed(model: Path, seed: int = 0, groups: int = 4) -> list[TrajectoryTokens]:
    """Groups with prompts of their own after one system prompt, as if sampled by a policy not far from `model`.

    Outputs have 1 to 200 tokens, most of them few. In each group one trajectory is a single token, two are alike, and
    two are branches of one session, whose first turn only one of them trains. One group has another temperature.
    """
    rng = np.random.default_rng(seed)
    system = rng.integers(3, VOCABULARY, 9).tolist()
    found = [t for g in range(groups) for t in _group(rng, g, system)]
    with torch.no_grad():
        logprobs_BT, _ = padded_logprobs(load_plain(model), found)
    return [_recorded(rng, t, row) for t, row in zip(found, logprobs_BT.numpy(), strict=True)]


def paid(trajectories: Iterable[TrajectoryTokens]) -> list[Sample]:
    """Advantages are the returns: not centred, so that the loss is no small difference of large numbers."""
    return [Sample(t, token_advantages(t, t.turn_returns)) for t in trajectories]


def _group(rng: np.random.Generator, g: int, system: list[int]) -> list[TrajectoryTokens]:
    prompt = system + rng.integers(3, VOCABULARY, 4 + 5 * g).tolist()

    def play(name: str, *outputs: list[int]) -> TrajectoryTokens:
        t = random_trajectory(
            rng,
            prompt,
            group=f"g{g}",
            name=name,
            turns=len(outputs),
            outputs=list(outputs),
            version=len(outputs) % 2,
            temperature=1.0 if g else 0.7,
        )
        returns = rng.normal(0.5, 1, len(outputs))
        return dataclasses.replace(t, turn_returns=returns, episode_return=float(returns[0]))

    several = [play(f"t{k}", *(_output(rng) for _ in range(1 + k % 3))) for k in range(4)]
    twin = dataclasses.replace(several[1], trajectory_id=f"g{g}-twin", episode_id=f"g{g}-twin")
    single = play("single", _output(rng)[:1])
    first = _output(rng)
    left, right = (play("branched", first, _output(rng)) for _ in range(2))
    right = dataclasses.replace(right, trajectory_id=f"g{g}-right", loss_mask=right.turn_ids == 1)
    return [*several, twin, single, left, right]


def _output(rng: np.random.Generator) -> list[int]:
    return rng.integers(3, VOCABULARY, 1 + min(int(rng.lognormal(2, 1.3)), 199)).tolist()


def _recorded(rng: np.random.Generator, t: TrajectoryTokens, logprobs_T: Any) -> TrajectoryTokens:
    """With the model's logprobs, off by a little, those of a tenth of the tokens by much."""
    off = rng.normal(0, np.where(rng.random(len(t.input_ids)) < 0.1, 1.5, 0.15))
    recorded = np.append(0.0, logprobs_T[: len(off) - 1]) + off
    return dataclasses.replace(t, logprobs=np.where(t.turn_ids >= 0, recorded, 0).astype(np.float32))
