"""The start of a trainer: replaces settings that are `auto` by what they mean on its device, and records them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal, TypeVar

import torch

from agentrl import visible
from agentrl.configs.episodes.teachers import is_folder, teachers_of
from agentrl.configs.run_config import RunConfig
from agentrl.configs.trainer_config import TrainerConfig, UpdateConfig
from agentrl.domain.schemas import Json
from agentrl.models import resolve_model
from agentrl.store.events import TRAINER_STARTED
from agentrl.trainer.distributed import World
from agentrl.trainer.run.device_defaults import RankDevice, compute_dtype, microbatch_tokens, shape_in
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer_facts import line

SHARED_FRACTION = 0.4
"""Share of a GPU for an engine beside a computing trainer, where `engine.memory_fraction` is null."""

AnyUpdate = TypeVar("AnyUpdate", bound=UpdateConfig)


def started(config: RunConfig, base_model: Path, world: World, lineage: Lineage) -> RunConfig:
    """The configuration of a run without `auto` in what a trainer needs to know. Rank 0 records the values as the event
    `trainer_started`, which a later trainer of the run and `agentrl status` read, and prints them. Collective.
    """
    began_with = world.share(lineage.started_with().get("dtype"))
    engines = (config.engine.memory_fraction or SHARED_FRACTION) if config.resources.divide_memory else 0.0
    trainer = resolved(config.trainer, base_model, world, began_with, 1 - engines)
    facts = facts_of(trainer, world) | {"engine_dtype": config.engine.dtype_on(engine_device(config, world.device))}
    if world.leads:
        now = time.time()
        lineage.record(TRAINER_STARTED, now, now, **facts)
        visible.say(f"trainer: {line(facts)}")
    return config.model_copy(update={"trainer": trainer})


def resolved(
    config: AnyUpdate, base_model: Path, world: World, began_with: str | None = None, share: float = 1.0
) -> AnyUpdate:
    """The settings of an update without `auto`. `began_with` is the compute type of the run's first trainer, `share`
    that of a GPU's memory which the trainer has. Collective.
    """
    device = rank_device(world, share)
    dtype = compute_dtype(config, device.kind, began_with)
    named = teachers_of(config.teacher) if isinstance(config, TrainerConfig) else []
    teachers = [shape_in(resolve_model(one)) for one in named if is_folder(one)]
    settings: Json = {
        "dtype": dtype,
        "tokens_per_microbatch": microbatch_tokens(
            config, dtype, shape_in(base_model), device, [s for s in teachers if s]
        ),
    }
    return config.model_copy(update=world.share(settings))


def rank_device(world: World, share: float) -> RankDevice:
    """The device of the ranks; of several sizes of memory the smallest. Collective."""
    if world.device.type != "cuda":
        return RankDevice(kind="cpu")
    memory = int(torch.cuda.get_device_properties(world.device).total_memory)
    least = min(world.everyones(memory))
    return RankDevice(kind="cuda", memory_bytes=int(share * least), shards=world.mesh.whole.shape[-1])


def facts_of(config: UpdateConfig, world: World) -> Json:
    """The facts that are recorded of a trainer's start."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    facts = {
        "device": name,
        "ranks": world.size,
        "dtype": config.dtype,
        "tokens_per_microbatch": config.tokens_per_microbatch,
    }
    return facts | ({"checkpoint_every": config.checkpoint_every} if isinstance(config, TrainerConfig) else {})


def engine_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The type in which engines keep matrices. Engines whose device is not configured have the trainer's, `device`."""
    dtype: torch.dtype = getattr(torch, config.engine.dtype_on(engine_device(config, device)))
    return dtype


def compared_dtype(config: RunConfig, device: torch.device) -> torch.dtype | None:
    """The engines' type where digests of their tensors can be compared with the trainer's: on CPUs. None elsewhere."""
    on_cpu = config.engine.device != "cuda" and device.type == "cpu"
    return engine_dtype(config, device) if on_cpu else None


def engine_device(config: RunConfig, device: torch.device) -> Literal["cpu", "cuda"]:
    """The engines' device; where it is not configured, the trainer's."""
    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if device.type == "cuda" else "cpu"
