"""One step of tuning: takes a batch of items, applies gradients and returns metrics."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from agentrl.configs.tuning_config import TuningTrainerConfig
from agentrl.domain.schemas import Float32
from agentrl.trainer.distributed import World
from agentrl.trainer.learning_rate import set_learning_rate
from agentrl.trainer.models.policy import Body
from agentrl.trainer.models.sharding import backward, reshard
from agentrl.trainer.optimizer import clip_gradients
from agentrl.trainer.packing import Microbatch, Sample, collate_share, plan
from agentrl.trainer.parallel.tensor_parallel import average_replicated
from agentrl.trainer.tuning.items import Item
from agentrl.trainer.tuning.methods import Method


class Sums:
    """Sums over microbatches. They stay on the device until all of them are fetched at once."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = defaultdict(float)
        self._on_device: dict[str, list[torch.Tensor]] = defaultdict(list)

    def add(self, parts: dict[str, torch.Tensor], m: Microbatch) -> None:
        """Add the 0-dim figures of a microbatch."""
        for name, value in parts.items():
            self._on_device[name].append(value.detach().double())
        self._counts["tokens_trained"] += len(m.advantages_S)
        self._counts["tokens_computed"] += len(m.input_ids_N)

    def fetched(self) -> dict[str, float]:
        """The sums by name."""
        names = list(self._on_device)
        totals = [torch.stack(values).sum() for values in self._on_device.values()]
        return self._counts | dict(zip(names, torch.stack(totals).tolist() if totals else [], strict=True))


Work = list[tuple[list[Sample], Microbatch]]
"""The microbatches of one rank, each with its samples in order."""


def train(
    model: Body,
    optimizer: torch.optim.Optimizer,
    items: Sequence[Item],
    method: Method,
    lr: float,
    config: TuningTrainerConfig,
    world: World,
) -> dict[str, float]:
    """Make one update. Returns its metrics, equal on every rank. Collective."""
    count, work = method.count(items), _work(model, items, method, config, world)
    sums = Sums()
    for i, (_, m) in enumerate(work, 1):
        loss, parts = method.loss(model, m)
        backward(model, loss / count, world, more=config.keep_gathered and i < len(work))
        sums.add(parts, m)
    average_replicated(model, world.mesh)
    grad_norm = clip_gradients(model, config.grad_clip)
    set_learning_rate(optimizer, lr)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    facts = {"grad_norm": grad_norm, "lr": lr, "packed": float(not model.unpacked)}
    return _metrics(world.total(sums.fetched()), count) | facts


@torch.no_grad()
def score(
    model: Body, items: Sequence[Item], method: Method, config: TuningTrainerConfig, world: World
) -> dict[str, float]:
    """The metrics of items without training on them. Collective."""
    sums = Sums()
    for part in _parts(items, config.batch_size):
        for _, m in _work(model, part, method, config, world):
            sums.add(method.loss(model, m)[1], m)
    reshard(model)  # the optimizer and checkpoints know shards
    return _metrics(world.total(sums.fetched()), method.count(items))


@torch.no_grad()
def with_reference(
    model: Body, items: Sequence[Item], method: Method, config: TuningTrainerConfig, world: World
) -> list[Item]:
    """The items with the model's logprobs in `tokens.logprobs`, at trained tokens. Collective."""
    known: dict[str, Float32] = {}
    for part in _parts(items, config.batch_size):
        for samples, m in _work(model, part, method, config, world):
            logprobs_P, _ = model(m)
            ends = np.cumsum([s.tokens.loss_mask.sum() for s in samples])
            logprobs = np.split(logprobs_P[m.predictions_S].cpu().numpy(), ends[:-1]) if samples else []
            known |= {s.tokens.trajectory_id: found for s, found in zip(samples, logprobs, strict=True)}
    reshard(model)
    for theirs in world.everyones(known):
        known |= theirs
    return [[_with_logprobs(sample, known[sample.tokens.trajectory_id]) for sample in item] for item in items]


def _with_logprobs(sample: Sample, of_trained: Float32) -> Sample:
    logprobs = np.zeros_like(sample.tokens.logprobs)
    logprobs[sample.tokens.loss_mask] = of_trained
    return dataclasses.replace(sample, tokens=dataclasses.replace(sample.tokens, logprobs=logprobs))


def _work(model: Body, items: Sequence[Item], method: Method, config: TuningTrainerConfig, world: World) -> Work:
    """This rank's share of a batch. Every rank has the same number of microbatches, since each is collective."""
    budget = model.budget(config.token_budget)
    (by_rank,) = plan(method.units(items, budget), ranks=world.data_size, minibatches=1, budget=budget)
    made = collate_share(by_rank, world.data_rank, budget)
    return [
        ([sample for unit in units for sample in unit.samples], m.to(world.device))
        for units, m in zip(by_rank[world.data_rank], made, strict=True)
    ]


def _parts(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _metrics(sums: dict[str, float], count: int) -> dict[str, float]:
    totals = ("tokens_trained", "tokens_computed")
    return {name: value if name in totals else value / count for name, value in sums.items()}
