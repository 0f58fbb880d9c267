"""The settings that decide whether a step fits, and the order in which a plan tries them.

shards of one replica    from the GPUs of one host to all ranks: the fewest that fit, since replicas talk least
for each of them         checkpointing, then without it (faster) if that fits too
if nothing fits          smaller microbatches, then context and tensor parallelism, then parameters in the hosts' memory
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentrl.configs.resources_config import TrainerSizes
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.metrics.model_shape import shape_of
from agentrl.trainer.run.device_defaults import RankDevice, compute_dtype, microbatch_tokens

SMALLEST_BUDGET = 2048
STATE_BYTES = 16.0
"""Bytes of a trained parameter between and in steps: parameter, gradient and two moments in float32."""
FROZEN_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How a step is executed."""

    ranks: int
    replicas: int
    tensor: int
    budget: int  # tokens of a microbatch that a rank has
    dtype: str
    checkpointing: bool
    offload: bool = False
    context: int = 1
    experts: int = 1

    @property
    def shards(self) -> int:
        """Ranks that hold one replica together."""
        return self.ranks // self.replicas

    @property
    def sizes(self) -> TrainerSizes:
        """As the configuration has it."""
        return TrainerSizes(
            ranks=self.ranks, replicas=self.replicas, tensor=self.tensor, context=self.context, experts=self.experts
        )

    @property
    def data(self) -> int:
        """Ranks with different microbatches."""
        return self.ranks // (self.tensor * self.context)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, which the ranks of a context group share."""
        return self.budget * self.context

    def config(self, given: TrainerConfig) -> TrainerConfig:
        """The trainer's configuration with this setting. Offload is computed from the trace without it."""
        return given.model_copy(
            update={
                "tokens_per_microbatch": self.budget,
                "dtype": self.dtype,
                "activation_checkpointing": self.checkpointing,
                "cpu_offload": False,
            }
        )

    def changes(self, other: Setting) -> dict[str, tuple[object, object]]:
        """Key of the configuration → its value in `other` and here, where they differ."""
        mine, theirs = asdict(self), asdict(other)
        return {KEYS[name]: (theirs[name], value) for name, value in mine.items() if value != theirs[name]}

    def __str__(self) -> str:
        """A few words for progress."""
        split = f"{self.ranks} ranks" + (f", {self.replicas} replicas" if self.replicas > 1 else "")
        for name, size in (("tensor", self.tensor), ("context", self.context), ("experts", self.experts)):
            split += f", {name} {size}" if size > 1 else ""
        how = [self.dtype, *(["checkpointing"] if self.checkpointing else []), *(["offload"] if self.offload else [])]
        return f"{split}, {self.budget} tokens, {', '.join(how)}"


KEYS = {
    "ranks": "resources.trainer.ranks",
    "replicas": "resources.trainer.replicas",
    "tensor": "resources.trainer.tensor",
    "context": "resources.trainer.context",
    "experts": "resources.trainer.experts",
    "budget": "trainer.tokens_per_microbatch",
    "dtype": "trainer.dtype",
    "checkpointing": "trainer.activation_checkpointing",
    "offload": "trainer.cpu_offload",
}


def configured(
    config: TrainerConfig, sizes: TrainerSizes, shape: Mapping[str, Any] | None = None, gpu_bytes: float = 0.0
) -> Setting:
    """The setting of a configuration for a model of this `shape` on GPUs; what is `auto` gets the trainer's choice."""
    dtype = compute_dtype(config, "cuda")
    device = RankDevice(kind="cuda", memory_bytes=int(gpu_bytes), shards=sizes.ranks // sizes.replicas)
    return Setting(
        sizes.ranks,
        sizes.replicas,
        sizes.tensor,
        microbatch_tokens(config, dtype, shape_of(shape) if shape else None, device),
        dtype,
        config.activation_checkpointing,
        config.cpu_offload,
        sizes.context,
        sizes.experts,
    )


def may_fit(setting: Setting, parameters: float, trained: float, gpu_bytes: float) -> bool:
    """Whether parameters, gradients and moments alone fit."""
    held = (STATE_BYTES * trained + FROZEN_BYTES * (parameters - trained)) / setting.shards
    return setting.offload or held < gpu_bytes


def sharings(setting: Setting, gpus: int) -> Iterator[Setting]:
    """The setting with bfloat16 and checkpointing, on the fewest shards first: one host's ranks, two hosts', …"""
    base = replace(setting, dtype="bfloat16", checkpointing=True, tensor=1, offload=False)
    shards = min(gpus, setting.ranks)
    while shards <= setting.ranks:
        if setting.ranks % shards == 0:
            yield replace(base, replicas=setting.ranks // shards)
        shards *= 2


def rescues(setting: Setting, gpus: int, longest: int) -> Iterator[Setting]:
    """What to try where nothing fits with all ranks as shards. No microbatch is smaller than the longest trajectory."""
    base = replace(setting, dtype="bfloat16", checkpointing=True, replicas=1, tensor=1, context=1, offload=False)
    smallest = max(SMALLEST_BUDGET, longest)
    budget = base.budget
    while budget // 2 >= smallest:
        budget //= 2
        yield replace(base, budget=budget)
    for context in (2, 4, 8):
        if context <= gpus and base.ranks % context == 0:
            yield replace(base, budget=max(SMALLEST_BUDGET, -(-smallest // context)), context=context)
    for tensor in (2, 4, 8):
        if tensor <= gpus and base.ranks % tensor == 0:
            yield replace(base, budget=max(smallest, min(base.budget, 2 * smallest)), tensor=tensor)
    yield replace(base, budget=budget, offload=True)
