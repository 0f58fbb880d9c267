"""Traces one step of the trainer on a fake accelerator: memory by part of the step, arithmetic, time and messages.

    load ─► moments ─► scoring (reference, critic) ─► for each microbatch: forward ─► head ─► backward ─► optimizer

The code that runs is the trainer's own. Hooks on the decoder blocks tell where in the step an operation belongs: peaks
are kept for the bottom and top blocks one by one, so that a trace of few blocks says what one of all blocks would say
(layer_extrapolation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.configs.episodes.teachers import is_folder, teachers_of
from agentrl.configs.resources_config import TrainerSizes
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import UserError
from agentrl.trainer.batches.share import Share
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.devices import Device
from agentrl.trainer.models.policy import Body, decoder
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample
from agentrl.trainer.planning.collective_trace import CollectiveTrace, Route, Traffic
from agentrl.trainer.planning.fake import flash_kernel
from agentrl.trainer.planning.fake.fake_accelerator import FakeAccelerator, fake_world
from agentrl.trainer.planning.memory_trace import Holds, MemoryTrace, Peak
from agentrl.trainer.planning.op_costs import OpCosts
from agentrl.trainer.planning.workload import Workload, filling_samples
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

LOAD, MOMENTS, SCORING = "load", "moments", "scoring"
FIRST, LAST, OPTIMIZER = "first", "last", "optimizer"
"""Phases of a step. The last microbatch stands for all but the first one."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The operations, memory and messages of a phase on one rank."""

    flops: float = 0.0
    seconds: float = 0.0  # by roofline, without collectives
    traffic: dict[Route, Traffic] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A traced step of one rank."""

    peaks: dict[str, Peak]  # by part of the step
    resting: Peak  # between steps
    efforts: dict[str, Effort]  # by phase
    passes: int  # microbatches of the trace
    parameters: float  # of the policy, over all ranks
    trained: float  # of these
    packed: bool
    why_unpacked: str = ""

    @property
    def worst(self) -> tuple[str, Peak]:
        """The part of a step with the most memory. What comes before the moments exist is none."""
        return max(
            ((n, p) for n, p in self.peaks.items() if n not in (LOAD, MOMENTS)), key=lambda named: named[1].total
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs that a trace assumes."""

    device: Device
    gpus: int = 8  # of a host


def trace_step(
    folder: Path,
    config: TrainerConfig,
    sizes: TrainerSizes,
    machine: Machine,
    work: Workload,
    edge: tuple[int, int] = (2, 2),
    passes: int = 2,
) -> StepTrace:
    """Trace a step of `passes` microbatches on rank 0. `edge`: how many bottom and top blocks have parts of their own.

    Raises UserError or ModelFolderError where the trainer would, before it asks for memory.
    """
    config = _plannable(config)
    costs, messages = OpCosts(machine.device), CollectiveTrace(machine.gpus)
    memory = MemoryTrace()

    def watch(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        memory.watch(func, args, kwargs, result)
        costs.watch(func, args, kwargs, result)
        messages.watch(func, args, kwargs, result)

    with ExitStack() as stack:
        world = stack.enter_context(world_of(sizes))
        for context in (memory.resizing(), flash_kernel.everywhere(), FakeAccelerator(watch)):
            stack.enter_context(context)
        memory.enter(LOAD)
        models = make_models(folder, config, world)
        optimizer = make_optimizer(models.policy, config)
        vocabulary = models.policy.lm.config.get_text_config().vocab_size
        memory.learn(vocabulary, _loaded(models))
        memory.enter(MOMENTS)
        for model, optimizes in _learners(models, optimizer):
            make_moments(model, optimizes, memory)
        resting = memory.peak_now()
        clock = Clock(costs, messages)
        budget = models.policy.budget(config.token_budget)
        samples = filling_samples(work, budget, passes * world.data_size, vocabulary)
        memory.enter(SCORING)
        clock.enter(SCORING)
        scored = _scored(samples, config, models, world)
        with _watched(models, optimizer, memory, clock, edge):
            update_policy(models.policy, optimizer, scored, 0, {0: 0}, config, world, models.critic)
        clock.enter("")
    why = models.policy.unpacked
    sizes_of = [(p.numel(), p.requires_grad) for p in models.policy.parameters()]
    parameters, trained = sum(n for n, _ in sizes_of), sum(n for n, trains in sizes_of if trains)
    return StepTrace(memory.peaks, resting, clock.efforts, passes, parameters, trained, not why, why)


def _plannable(config: TrainerConfig) -> TrainerConfig:
    """The settings without what does not change a step's size. Raises UserError for teachers that cannot be traced."""
    one = [*map(is_folder, teachers_of(config.teacher))] in ([], [True])
    if not one or config.algorithm.compares_vocabularies:
        raise UserError(
            "trainer.teacher: a plan can have one teacher that is a model, with algorithm.distill: sampled; plan "
            "without the teacher, and leave room for it"
        )
    return config.model_copy(update={"critic_from": None})  # the critic's shape is the policy's


class Clock:
    """Divides what operations cost among phases."""

    def __init__(self, costs: OpCosts, messages: CollectiveTrace) -> None:
        self._costs, self._messages = costs, messages
        self._phase, self._before = "", self._now()
        self.efforts: dict[str, Effort] = {}

    def _now(self) -> Effort:
        return Effort(self._costs.flops, self._costs.seconds, self._messages.traffic)

    def enter(self, phase: str) -> None:
        """End a phase and begin another. A phase that comes again counts anew."""
        now, before = self._now(), self._before
        if self._phase:
            traffic = {route: t + before.traffic.get(route, Traffic()) * -1 for route, t in now.traffic.items()}
            traffic = {route: t for route, t in traffic.items() if t.messages}
            self.efforts[self._phase] = Effort(now.flops - before.flops, now.seconds - before.seconds, traffic)
        self._phase, self._before = phase, now


def make_moments(model: Body, optimizer: torch.optim.Optimizer, memory: MemoryTrace | None = None) -> None:
    """Make AdamW's moments, which it would make in its first step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    parameters = [p for _, p in model.trainable()]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    if memory:
        memory.holds([t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)], Holds.MOMENTS)


def _loaded(models: Models) -> list[Tensor]:
    """All tensors that the models hold."""
    bodies: list[Any] = [models.policy, *([models.critic.critic] if models.critic else [])]
    held = [t for body in bodies for t in (*body.parameters(), *body.buffers())]
    copies = [copy.tensors.values() for copy in (models.reference, models.average) if copy is not None]
    return held + [tensor for tensors in copies for tensor in tensors]


def world_of(sizes: TrainerSizes) -> AbstractContextManager[World]:
    """Rank 0 of ranks on fake accelerators."""
    return fake_world(sizes.ranks, sizes.replicas, sizes.tensor, context=sizes.context, experts=sizes.experts)


def _learners(models: Models, optimizer: torch.optim.Optimizer) -> list[tuple[Body, torch.optim.Optimizer]]:
    critic = models.critic
    return [(models.policy, optimizer), *([(critic.critic, critic.optimizer)] if critic else [])]


def _scored(samples: list[Sample], config: TrainerConfig, models: Models, world: World) -> Share | list[Sample]:
    """With what reference and critic say, and with an advantage at every loss token, so that all groups teach."""
    algorithm = config.algorithm
    if not (algorithm.needs_reference or algorithm.needs_critic or algorithm.teaches_tokens):
        return samples
    trajectories = [s.tokens for s in samples]
    share = make_samples(trajectories, config.algorithm, models, config.token_budget, world)
    advantages = [samples[i].advantages for i in share.indices]
    kept = [replace(s, advantages=a) for s, a in zip(share.samples, advantages, strict=True)]
    return replace(share, samples=kept)


@contextmanager
def _watched(
    models: Models, optimizer: torch.optim.Optimizer, memory: MemoryTrace, clock: Clock, edge: tuple[int, int]
) -> Iterator[None]:
    """Enter parts and phases as the update reaches them, until the block ends."""
    handles: list[Any] = []
    for name, body in [("policy", models.policy), *([("critic", models.critic.critic)] if models.critic else [])]:
        blocks = list(decoder(body.lm).layers)
        for i, block in enumerate(blocks):
            at = f"{name} {place(i, len(blocks), edge)}"
            handles += _of_block(block, at, "head" if i == len(blocks) - 1 else None, memory)
        if name == "policy":
            handles.append(body.register_forward_pre_hook(_microbatches(clock, memory), prepend=True))
    for _, optimizes in _learners(models, optimizer):
        handles.append(optimizes.register_step_pre_hook(lambda *_: _optimize(clock, memory)))
        handles.append(optimizes.register_step_post_hook(lambda *_: _optimized(memory)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def place(block: int, blocks: int, edge: tuple[int, int]) -> str:
    """The name of a block's place: counted from the bottom or the top near these, or the middle."""
    bottom, top = edge
    if block < bottom:
        return f"block {block}"
    return f"block -{blocks - block}" if blocks - block <= top else "middle"


def _of_block(block: Any, at: str, then: str | None, memory: MemoryTrace) -> list[Any]:
    def before(*_: Any) -> None:
        memory.enter(f"forward {at}")

    def after(_: Any, __: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(lambda _: memory.enter(f"backward {at}"))
        if then:
            memory.enter(then)

    return [block.register_forward_pre_hook(before, prepend=True), block.register_forward_hook(after, prepend=True)]


def _microbatches(clock: Clock, memory: MemoryTrace) -> Callable[..., None]:
    count = 0

    def begin(*_: Any) -> None:
        nonlocal count
        if torch.is_grad_enabled():
            clock.enter(LAST if count else FIRST)
            memory.enter("embedding")
            count += 1

    return begin


def _optimize(clock: Clock, memory: MemoryTrace) -> None:
    clock.enter(OPTIMIZER)
    memory.enter(OPTIMIZER)
    memory.default = Holds.MOMENTS


def _optimized(memory: MemoryTrace) -> None:
    memory.default = None
