"""The section `resources`: how many engines and trainer ranks a run has, and how many GPUs each takes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from agentrl.configs.allocation_string import resources_of
from agentrl.configs.section import Positive, Section


class EngineResources(Section):
    """The engines that a run starts. An engine takes tensor × pipeline × data GPUs."""

    count: Positive = 1
    """Number of engines to start."""
    tensor: Positive = 1
    """GPUs over which an engine splits each layer's matrices (tensor parallel)."""
    pipeline: Positive = 1
    """Stages of consecutive layers into which an engine splits the model (pipeline parallel)."""
    data: Positive = 1
    """Copies of the model behind an engine's address (data parallel)."""
    experts: Positive = 1
    """Ranks of an engine that share the experts of a mixture (expert parallel); a divisor of `tensor`."""
    hosts: Positive = 1
    """Hosts over which one engine is divided in equal parts. More than 1 needs a `placement` other than local."""

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor * self.pipeline * self.data

    @model_validator(mode="after")
    def _experts_are_spread(self) -> Self:
        if self.tensor % self.experts:
            raise ValueError(f"tensor {self.tensor} is not a multiple of experts {self.experts}")
        if self.gpus % self.hosts:
            raise ValueError(f"tensor × pipeline × data = {self.gpus} is not a multiple of hosts {self.hosts}")
        return self


class TrainerSizes(Section):
    """The processes (ranks) of a trainer. Each takes one GPU, and holds its part of policy, critic and reference."""

    ranks: Positive = 1
    """Number of processes that share the model and the data."""
    replicas: Positive = 1
    """Number of model copies, each sharded over ranks / replicas processes; 1: shard over all ranks."""
    tensor: Positive = 1
    """Ranks over which each block's matrix products are split, by the model's plan in transformers (tensor
    parallel).
    """
    context: Positive = 1
    """Ranks over which the tokens of each microbatch are divided (context parallel): the longest trajectory that fits
    grows with them. At most the number of heads.
    """
    experts: Positive = 1
    """Ranks over which the experts of a mixture are divided (expert parallel); a divisor of ranks / replicas, and 1 or
    a multiple of `tensor`. The ranks of a tensor group divide the experts in any case.
    """

    @model_validator(mode="after")
    def _ranks_are_shared_out(self) -> Self:
        if self.ranks % self.replicas:
            raise ValueError(f"ranks {self.ranks} is not a multiple of replicas {self.replicas}")
        shards = self.ranks // self.replicas
        if shards % self.tensor:
            parts = self.replicas * self.tensor
            raise ValueError(f"ranks {self.ranks} is not a multiple of replicas × tensor = {parts}")
        groups, sharing = shards // self.tensor, [n for n in range(1, shards + 1) if shards % n == 0]
        if groups % self.context:
            near = _nearest(self.context, [n for n in range(1, groups + 1) if groups % n == 0])
            raise ValueError(f"context {self.context} does not divide ranks / (replicas × tensor) = {groups}; {near}")
        if self.experts not in (valid := [n for n in sharing if n == 1 or n % self.tensor == 0]):
            near = _nearest(self.experts, valid)
            multiple = f" in multiples of tensor {self.tensor}" if self.tensor > 1 else ""
            raise ValueError(f"experts {self.experts} does not divide ranks / replicas = {shards}{multiple}; {near}")
        return self


def _nearest(asked: int, valid: list[int]) -> str:
    """The valid numbers around one that is not."""
    near = [*[n for n in valid if n < asked][-1:], *[n for n in valid if n > asked][:1]]
    return f"{' or '.join(map(str, near))} would"


class TrainerResources(TrainerSizes):
    """The processes of a run's trainer, which several hosts may share."""

    hosts: Positive = 1
    """Hosts over which the ranks are divided in equal parts. More than 1 needs a `placement` other than local."""

    @model_validator(mode="after")
    def _hosts_get_equal_shares(self) -> Self:
        if self.ranks % self.hosts:
            raise ValueError(f"ranks {self.ranks} is not a multiple of hosts {self.hosts}")
        return self


class Resources(Section):
    """The sizes of a run's parts. `resources: sglang:d4t2+fsdp:d8` is short for all of them."""

    allocation: str | None = None
    """AReaL's allocation string; it sets the other keys."""
    engines: EngineResources = EngineResources()
    trainer: TrainerResources = TrainerResources()
    proxies: Annotated[int, Field(ge=1, le=1000)] = 1
    """Proxies, on any hosts. More than 1 needs a `placement` other than local; `proxy.workers` are processes of one."""
    rollout_workers: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Processes that run agents. A placement other than local puts them on any hosts."""
    colocated: bool | None = None
    """Run engines and trainer on the same GPUs; null: only if the GPUs are too few for both. They take turns: engines
    release their memory while the trainer computes a step. True needs `placement: local`.
    """
    divide_memory: bool = False
    """On the same GPUs, divide the memory instead of taking turns: engines sample while the trainer computes. An engine
    uses the share `engine.memory_fraction`, 0.4 by default.
    """

    @property
    def takes_turns(self) -> bool:
        """Whether engines release their memory while the trainer computes. `agentrl train` sets a null `colocated`."""
        return bool(self.colocated) and not self.divide_memory

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, value: Any) -> Any:
        """Replace an allocation string by the keys that it stands for."""
        data = {"allocation": value} if isinstance(value, str) else value
        if not isinstance(data, dict) or not isinstance(text := data.get("allocation"), str):
            return data
        meant = resources_of(text)
        if wrong := sorted(key for key in meant.keys() & data.keys() if not _agrees(data[key], meant[key])):
            raise ValueError(f"allocation {text!r} sets {', '.join(wrong)} already")
        return data | {
            key: value | data[key] if isinstance(data.get(key), dict) else value for key, value in meant.items()
        }


def _agrees(given: Any, meant: Any) -> bool:
    """Whether a value says what an allocation string says, as in a stored configuration, which has both.

    A string does not say over how many hosts a part is divided.
    """
    if isinstance(given, dict) and isinstance(meant, dict):
        return all(key == "hosts" or value == meant.get(key, 1) for key, value in given.items())
    return bool(given == meant)


class TuningResources(Section):
    """The sizes of the parts of `agentrl sft`, `dpo` and `reward-model`."""

    trainer: TrainerSizes = TrainerSizes()
