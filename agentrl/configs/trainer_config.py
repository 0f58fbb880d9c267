"""The section `trainer`: the optimizer, how the work is carried out, and the policy update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.section import NonNegative, Positive, Seconds, Section

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output head."""


class AdapterConfig(Section):
    """Low-rank adapters in place of full training (needs the extra `lora`)."""

    rank: NonNegative = 0
    """Inner width of an adapter; 0 trains whole matrices, without adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [ALL_LINEAR])
    """Last names of the linear layers that get one, `q_proj` say; `all-linear`: each, but for the output head."""


class LoraConfig(AdapterConfig):
    """An adapter of the policy, and how engines get it."""

    publish: Literal["merged", "adapter"] = "merged"
    """What engines get: `merged`, the changed matrices whole, which any engine takes; `adapter`, it alone, which they
    load while they sample on, if they were started with room for it."""

    @model_validator(mode="after")
    def _only_an_adapter_is_published_as_one(self) -> LoraConfig:
        if self.publish == "adapter" and not self.rank:
            raise ValueError("publish: adapter needs a rank above 0")
        return self


class UpdateConfig(Section):
    """What every kind of training takes: its optimizer, and how its work is carried out."""

    lr: Annotated[float, Field(gt=0)] = 5e-5
    """AdamW learning rate, at its highest."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes on after the warm-up: `linear` and `cosine` fall to 0 at the end of the last step."""
    warmup_steps: NonNegative = 0
    """Steps over which it rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW moment decays."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW weight decay."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm is clipped to this."""
    train_layers: Positive | None = None
    """Train only the top N decoder blocks (and the final norm); null trains everything."""
    lora: AdapterConfig = AdapterConfig()
    tokens_per_microbatch: Positive = 4096
    """Packing budget: tokens of one forward pass; of a model that is not packed one sequence, however long."""
    ranks: Positive = 1
    """Processes (torchrun) that share the model and the data."""
    replicas: Positive = 1
    """Whole copies of the model among the ranks, each sharded over ranks / replicas of them; 1 shards over all."""
    tensor_parallel: Positive = 1
    """Ranks that split each block's matrix products among them, by the plan that transformers has for the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where torch sees a GPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights stay float32."""
    threads: NonNegative = 0
    """CPU threads per rank; 0 leaves torch's choice."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder block and compute the block again in the backward: less memory, more time."""
    keep_gathered: bool = False
    """Several ranks gather weights once an update, keep them until its last microbatch, and reduce gradients only then:
    faster, where the whole model with its gradients fits in each rank's memory."""
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's moments in the CPU's memory, a block at a time on the GPU: CUDA only."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Newest checkpoints kept on disk."""
    keep_best: str | None = None
    """A metric of steps: the checkpoint with its largest value is kept beside the newest; with `-` in front of it, the
    smallest. null: none."""

    @model_validator(mode="after")
    def _ranks_are_shared_out(self) -> Self:
        if self.ranks % self.replicas:
            raise ValueError(f"ranks {self.ranks} is no multiple of replicas {self.replicas}")
        parts = self.replicas * self.tensor_parallel
        if self.ranks % parts:
            raise ValueError(f"ranks {self.ranks} is no multiple of replicas × tensor_parallel = {parts}")
        return self

    @model_validator(mode="after")
    def _one_part_is_trained(self) -> Self:
        if self.lora.rank and self.train_layers:
            raise ValueError("lora and train_layers exclude one another")
        return self


CHANGEABLE_OF_TRAINER = (
    "trainer.ranks",
    "trainer.replicas",
    "trainer.tensor_parallel",
    "trainer.device",
    "trainer.threads",
    "trainer.tokens_per_microbatch",
    "trainer.activation_checkpointing",
    "trainer.keep_gathered",
    "trainer.cpu_offload",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
)
"""Keys of any training that may change when it is resumed: they say how it is carried out, not what it computes."""


class TrainerConfig(UpdateConfig):
    """The policy update."""

    groups_per_step: Positive = 8
    """Groups in one batch."""
    max_staleness: NonNegative = 1
    """No token older than this many weight versions is trained (AReaL: max_head_offpolicyness)."""
    stale_policy: Literal["mask", "drop"] = "mask"
    """What a too-old token does: `mask` takes it out of the loss, `drop` its whole trajectory (its reward stays)."""
    minibatches: Positive = 1
    """Optimizer updates per step; the batch is split by whole groups."""
    algorithm: Algorithm = Algorithm()
    lora: LoraConfig = LoraConfig()
    critic_lr: Annotated[float, Field(gt=0)] = 1e-4
    """AdamW learning rate of a critic; the other options of the optimizer are shared."""
    reference: Path | None = None
    """The reference policy of `kl_coef`: a model's folder, a checkpoint or one of a run's `weights/` folders, whose
    tensors replace the base model's; null: the base model."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a NaN or infinite loss or gradient does: `stop` fails the run, `skip` leaves its minibatch out. Either way
    an event names the trajectories."""
    stop_timeout_s: Seconds = 600.0
    """After Ctrl-C `agentrl train` lets the trainer finish and save the step in hand for so long; a second Ctrl-C kills
    it at once, and the step is made again."""
    checkpoint_every: Positive = 1
    """Steps between durable checkpoints; a resume rolls back the steps after the newest one and trains them again."""

    @model_validator(mode="after")
    def _reference_is_asked_for(self) -> Self:
        if self.reference and not self.algorithm.needs_reference:
            raise ValueError("reference is of algorithm.kl_coef, which is 0")
        return self
