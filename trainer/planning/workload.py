"""The batch of a traced step: groups that each fill one microbatch, with trajectories that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import PROMPT_VERSION, TrajectoryTokens
from agentrl.trainer.packing import Sample

SMALLEST = 8
"""Sampled tokens of the shortest trajectory that fills up a group."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The trajectories of a step, as the plan assumes them."""

    tokens: int  # of a trajectory
    prompt: int  # of these, in the prompt that a group shares
    group_size: int
    groups: int  # of a step

    @property
    def distinct(self) -> int:
        """Distinct tokens of a step: what its forward passes compute."""
        return self.groups * (self.prompt + self.group_size * (self.tokens - self.prompt))

    @property
    def all_tokens(self) -> int:
        """Tokens of a step's trajectories, a shared prompt once for each."""
        return self.groups * self.group_size * self.tokens


def filling_samples(work: Workload, budget: int, count: int, vocabulary: int) -> list[Sample]:
    """Samples of `count` groups, each of which is one microbatch of `budget` distinct tokens, or of one trajectory that
    is longer.
    """
    lengths = _lengths(work, budget)
    rng = np.random.default_rng(0)
    body = rng.integers(0, vocabulary, max(lengths) + len(lengths)).astype(np.int32)
    samples = []
    for group in range(count):
        prompt = np.concatenate([[group % vocabulary], body[: work.prompt - 1]]).astype(np.int32)
        for i, length in enumerate(lengths):
            rest = body[work.prompt : length].copy()
            rest[0] = i % vocabulary  # no other trajectory goes on like this
            samples.append(_sample(f"g{group}", f"g{group}-t{i}", prompt, rest))
    return samples


def _lengths(work: Workload, budget: int) -> list[int]:
    """Lengths of a group's trajectories. The last token of each is only predicted, so it is no node of the tree."""
    full = max(1, (budget - work.prompt) // (work.tokens - 1 - work.prompt))
    lengths = [work.tokens] * full
    left = budget - work.prompt - full * (work.tokens - 1 - work.prompt)
    return [*lengths, work.prompt + left + 1] if left >= SMALLEST else lengths


def _sample(group: str, name: str, prompt: np.ndarray, rest: np.ndarray) -> Sample:
    ids = np.concatenate([prompt, rest])
    sampled = np.arange(len(ids)) >= len(prompt)
    tokens = TrajectoryTokens(
        trajectory_id=name,
        session_id=name,
        episode_id=name,
        group_id=group,
        input_ids=ids,
        loss_mask=sampled,
        logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 0, PROMPT_VERSION).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), np.float32),
        turn_returns=np.ones(1),
        episode_return=1.0,
    )
    return Sample(tokens, np.where(sampled, 1.0, 0.0).astype(np.float32))
