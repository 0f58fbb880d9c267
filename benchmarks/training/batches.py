"""Makes the trajectories that every variant trains on, from a seed, so that no process must send them to another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentrl.domain.schemas import PROMPT_VERSION, Int32, TrajectoryTokens
from agentrl.trainer.packing import Sample, make_units, plan

FIRST_TOKEN = 3
"""The lowest id of ordinary tokens. The ids below are padding, start and end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of one-turn trajectories. Lengths in tokens."""

    groups: int
    group_size: int
    prompt: int
    output: int
    sigma: float = 0.0  # lengths of outputs are e^N(0, sigma), scaled so that the longest is `output`
    shares_prompt: bool = False  # else every trajectory of a group has a prompt of its own

    @property
    def trajectories(self) -> int:
        """The number of trajectories in the batch."""
        return self.groups * self.group_size


SHAPES = {
    "even": Shape(2, 4, 16, 112),
    "tails": Shape(2, 4, 16, 240, sigma=1.0),
    "shared": Shape(4, 4, 112, 16, shares_prompt=True),
}
"""The shapes that are measured on a CPU."""
QUICK = {
    "even": Shape(2, 4, 8, 16),
    "tails": Shape(2, 4, 8, 48, sigma=1.0),
    "shared": Shape(2, 4, 32, 8, shares_prompt=True),
}
ON_GPU = {
    "even": Shape(8, 8, 256, 768),
    "tails": Shape(8, 8, 256, 3840, sigma=1.0),
    "shared": Shape(8, 8, 1536, 512, shares_prompt=True),
}


def make_samples(shape: Shape, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Samples with random tokens, a random advantage per trajectory, and the logprobs of a nearly uniform policy."""
    rng = np.random.default_rng(seed)
    outputs = lengths(shape, rng)
    samples = []
    for group in range(shape.groups):
        prompt = rng.integers(FIRST_TOKEN, vocabulary, shape.prompt, np.int32)
        for member in range(shape.group_size):
            if not shape.shares_prompt:
                prompt = rng.integers(FIRST_TOKEN, vocabulary, shape.prompt, np.int32)
            output = rng.integers(FIRST_TOKEN, vocabulary, outputs[len(samples)], np.int32)
            tokens = trajectory(f"g{group}", f"g{group}-{member}", prompt, output, vocabulary)
            samples.append(Sample(tokens, np.where(tokens.loss_mask, rng.normal(), 0).astype(np.float32)))
    return samples


def lengths(shape: Shape, rng: np.random.Generator) -> list[int]:
    """The lengths of the outputs."""
    drawn = np.exp(rng.normal(0, shape.sigma, shape.trajectories))
    return [int(n) for n in np.maximum(1, np.round(shape.output * drawn / drawn.max()))]


def trajectory(group: str, name: str, prompt: Int32, output: Int32, vocabulary: int) -> TrajectoryTokens:
    """A trajectory of one prompt and one output."""
    sampled = np.arange(len(prompt) + len(output)) >= len(prompt)
    return TrajectoryTokens(
        trajectory_id=name,
        session_id=name,
        episode_id=name,
        group_id=group,
        input_ids=np.concatenate([prompt, output]),
        loss_mask=sampled,
        logprobs=np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
        versions=np.where(sampled, 0, PROMPT_VERSION).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int32),
        temperatures=np.ones(len(sampled), np.float32),
        turn_returns=np.zeros(1),
        episode_return=0.0,
    )


def split(samples: list[Sample], minibatches: int, budget: int) -> list[list[Sample]]:
    """The samples of each minibatch, as our trainer chooses them. All variants use the same minibatches."""
    planned = plan(make_units(samples, budget), ranks=1, minibatches=minibatches, budget=budget)
    return [[s for units in ranks[0] for unit in units for s in unit.samples] for ranks in planned]


def rows_within(count: int, width: int, budget: int) -> int:
    """The most rows of `width` that fit into the budget and divide `count` rows evenly; at least 1."""
    return max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * width <= budget))


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of tokens in a batch, for one pass."""

    tokens: int  # of all trajectories, with prompts and without padding; tokens per second count these
    distinct: int  # tokens that must be computed: shared prompts once, none after the last prediction
    padded: int  # tokens of a rectangle, with prompts and outputs padded to the longest of each
    loss_tokens: int


def count(samples: list[Sample], minibatches: int, budget: int) -> Counts:
    """Count the tokens to compute, with and without padding."""
    distinct = 0
    for part in split(samples, minibatches, budget):
        units = make_units(part, budget)
        distinct += sum(u.size for u in units)
    prompts = [int(np.argmax(s.tokens.loss_mask)) for s in samples]
    totals = [len(s.tokens.input_ids) for s in samples]
    longest = max(prompts) + max(t - p for t, p in zip(totals, prompts, strict=True))
    return Counts(
        tokens=sum(totals),
        distinct=distinct,
        padded=len(samples) * longest,
        loss_tokens=sum(int(s.tokens.loss_mask.sum()) for s in samples),
    )
