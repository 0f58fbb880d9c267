"""Makes the plan of a run: traces its step, tries settings until one fits, and counts what engines hold.

shape ─► two small models ─► traces ─► all layers ─► estimate on the GPUs ─► fits? ─► the next setting
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.configs.run_config import RunConfig
from agentrl.errors import UserError
from agentrl.trainer.planning.engine_memory import EngineMemory, engine_memory, least_tensor
from agentrl.trainer.planning.layer_extrapolation import edges, extrapolated, samples
from agentrl.trainer.planning.plan_settings import Setting, configured, may_fit, rescues, sharings
from agentrl.trainer.planning.shape_folder import Layers, layers_of, with_layers, write_shape
from agentrl.trainer.planning.step_estimate import Cluster, Estimate, estimate
from agentrl.trainer.planning.step_trace import Machine, StepTrace, trace_step
from agentrl.trainer.planning.workload import Workload

Say = Callable[[str], None]
MOMENTS_AND_MASTER = 12.0
"""Bytes of a trained parameter in a checkpoint."""
PUBLISHED = 2.0
"""Bytes of a parameter that engines get."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A setting, and the step with it; or why the trainer refuses it."""

    setting: Setting
    estimate: Estimate | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can run."""
        return self.estimate is not None and self.estimate.fits


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The engines of a run."""

    count: int
    tensor: int
    memory: EngineMemory
    running: int | None  # requests that the engines decode together at most; None: as many as their cache holds
    colocated: bool

    def episodes(self, tokens: int) -> int:
        """Episodes of so many tokens that are in the cache and decoded together."""
        held = self.memory.episodes(tokens) * self.count
        return held if self.running is None else min(held, self.running)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The memory, time and messages of a run on a cluster."""

    model: str
    shape: dict[str, Any] = field(repr=False)
    layers: int
    parameters: float
    trained: float
    cluster: Cluster
    work: Workload
    asked: Tried
    proposed: Tried | None  # None where nothing fits, or the asked setting does and is as good
    tried: list[Tried]
    engines: EnginePlan
    publish_bytes: float
    checkpoint_bytes: float
    packed: bool


class Tracer:
    """Traces settings of one model, each once."""

    def __init__(self, shape: dict[str, Any], run: RunConfig, cluster: Cluster, work: Workload, say: Say) -> None:
        self.layers: Layers = layers_of(shape)
        self._shape, self._run, self._cluster, self._work, self._say = shape, run, cluster, work, say
        self._traces: dict[Setting, StepTrace] = {}

    def trace(self, setting: Setting) -> StepTrace:
        """The step of all layers. Raises UserError where the trainer would."""
        key = replace(setting, offload=False)
        if key not in self._traces:
            self._say(f"tracing {key}")
            at = samples(self.layers)
            found = [self._traced(key, layers) for layers in dict.fromkeys(at)]
            self._traces[key] = extrapolated(found[0], found[-1], at, self.layers)
        return self._traces[key]

    def tried(self, setting: Setting) -> Tried:
        """Trace and estimate a setting."""
        try:
            trace = self.trace(setting)
        except UserError as error:
            return Tried(setting, refused=str(error))
        found = estimate(
            trace, self._work, setting.tokens, setting.data, setting.ranks, self._cluster, offload=setting.offload
        )
        return Tried(setting, found)

    def _traced(self, setting: Setting, layers: Layers) -> StepTrace:
        config = setting.config(self._run.trainer)
        if config.train_layers:  # of the layers that are left out, none trains before the others
            config = config.model_copy(update={"train_layers": min(config.train_layers, layers.count)})
        machine = Machine(self._cluster.device, self._cluster.gpus)
        passes = 3 if config.keep_gathered else 2
        with tempfile.TemporaryDirectory(prefix="agentrl-plan-") as folder:
            shape = write_shape(Path(folder), with_layers(self._shape, layers))
            return trace_step(shape, config, setting.sizes, machine, self._work, edges(self.layers), passes)


def make_plan(
    run: RunConfig, model: str, shape: dict[str, Any], cluster: Cluster, work: Workload, ranks: int, say: Say
) -> RunPlan:
    """The plan of a run whose trainer has `ranks` of the cluster's GPUs.

    Raises UserError when the model cannot be made or trained, or when the trainer refuses the configured setting and
    all others.
    """
    tracer = Tracer(shape, run, cluster, work, say)
    sizes = run.resources.trainer
    given = sizes if sizes.ranks == ranks else sizes.model_copy(update={"ranks": ranks, "replicas": 1, "tensor": 1})
    asked = tracer.tried(configured(run.trainer, given, shape, cluster.device.memory_bytes))
    tried = [asked]
    best = _search(tracer, asked.setting, cluster, work, tried)
    known = next((t for t in tried if t.estimate), None)
    if known is None:
        raise UserError(asked.refused)
    trace = tracer.trace(known.setting)
    better = best if best and (not asked.fits or _faster(best, asked)) else None
    chosen = better or asked
    resting = trace_resting(tracer, chosen)
    engines = plan_engines(run, shape, trace.parameters, cluster, ranks, resting)
    return RunPlan(
        model,
        shape,
        tracer.layers.count,
        trace.parameters,
        trace.trained,
        cluster,
        work,
        asked,
        better,
        tried,
        engines,
        PUBLISHED * (trace.trained if run.trainer.lora.publish == "adapter" else trace.parameters),
        MOMENTS_AND_MASTER * trace.trained,
        trace.packed,
    )


def _search(tracer: Tracer, asked: Setting, cluster: Cluster, work: Workload, tried: list[Tried]) -> Tried | None:
    """The first setting that fits, and whether it also does without checkpointing. Adds everything to `tried`."""
    memory = cluster.device.memory_bytes

    def attempt(setting: Setting) -> Tried:
        found = next((t for t in tried if t.setting == setting), None)
        if found is None:
            found = tracer.tried(setting)
            tried.append(found)
        return found

    parameters = trained = 0.0
    for setting in sharings(asked, cluster.gpus):
        if not parameters:
            trace = tracer.trace(setting)
            parameters, trained = trace.parameters, trace.trained
        if not may_fit(setting, parameters, trained, memory):
            continue
        if (found := attempt(setting)).fits:
            plain = attempt(replace(setting, checkpointing=False))
            return plain if plain.fits and _faster(plain, found) else found
    for setting in rescues(asked, cluster.gpus, work.tokens):
        if may_fit(setting, parameters, trained, memory) and (found := attempt(setting)).fits:
            return found
    return None


def _faster(one: Tried, other: Tried) -> bool:
    assert one.estimate
    assert other.estimate
    return one.estimate.seconds < 0.98 * other.estimate.seconds


def trace_resting(tracer: Tracer, tried: Tried) -> float:
    """Bytes that the trainer holds on a GPU between steps."""
    if tried.estimate is None or tried.setting.offload:
        return 0.0
    return float(tracer.trace(tried.setting).resting.total)


def plan_engines(
    run: RunConfig, shape: dict[str, Any], parameters: float, cluster: Cluster, ranks: int, resting: float
) -> EnginePlan:
    """The engines beside a trainer of `ranks` GPUs: as configured, else as many as the GPUs left take, else on the
    trainer's GPUs in turns.
    """
    config, memory = run.resources.engines, cluster.device.memory_bytes
    dtype = "bfloat16"  # float32 is for a CPU
    free = cluster.total - ranks
    colocated = run.resources.colocated or free < config.gpus
    taken = resting if colocated else 0.0
    if config.gpus * config.count > 1:
        tensor, count = config.tensor, config.count
    else:
        tensor = least_tensor(parameters, memory, cluster.gpus, dtype, taken)
        count = max(1, (cluster.total if colocated else free) // tensor)
    found = engine_memory(
        shape,
        parameters,
        memory,
        tensor=tensor,
        pipeline=config.pipeline,
        data=config.data,
        dtype=dtype,
        cache_dtype=run.engine.kv_cache_dtype,
        fraction=run.engine.memory_fraction,
        taken=taken,
    )
    most = run.engine.max_running_requests
    return EnginePlan(count, tensor, found, None if most is None else most * count, bool(colocated))
