"""The section `trainer`: the optimizer, the execution of the update, and the policy update."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.episodes.task_sources import FUNCTION
from agentrl.configs.episodes.teachers import POLICY, Teachers, TeacherServerConfig, is_server, teachers_of
from agentrl.configs.section import NonNegative, Positive, Seconds, Section

ALL_LINEAR = "all-linear"
"""Selects all linear layers except the output head."""
Auto = Literal["auto"]
Schedule = Literal["constant", "linear", "cosine"]
CPU_TOKENS = 4096
"""What `tokens_per_microbatch: auto` means on a CPU."""
EVALUATED = ("evaluation", "eval-rollout")
"""The first parts of the names of metrics that an evaluation measures, after the step."""


class AdapterConfig(Section):
    """Low-rank adapters instead of full training (needs the extra `lora`)."""

    rank: NonNegative = 0
    """Rank of an adapter; 0: train full matrices."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of an adapter: its product is multiplied by alpha / rank."""
    targets: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: [ALL_LINEAR])
    """Names of the linear layers that get an adapter, for example `q_proj`; `all-linear`: all except the
    output head. Experts of a mixture that are one tensor get none.
    """


class LoraConfig(AdapterConfig):
    """An adapter of the policy, and how it is published."""

    publish: Literal["merged", "adapter"] = "merged"
    """`merged`: publish the changed matrices, which works with any engine; `adapter`: publish the adapter, which
    engines load while they sample, if they were started with a large enough `--lora-rank`.
    """

    @model_validator(mode="after")
    def _only_an_adapter_is_published_as_one(self) -> LoraConfig:
        if self.publish == "adapter" and not self.rank:
            raise ValueError("publish: adapter needs a rank above 0")
        return self


class UpdateConfig(Section):
    """Settings of all kinds of training: the optimizer, and the execution of the update."""

    lr: Annotated[float, Field(gt=0)] = 5e-5
    """Peak learning rate of AdamW."""
    lr_schedule: Schedule = "constant"
    """Schedule after the warm-up: `linear` and `cosine` fall to 0 at the last step."""
    warmup_steps: NonNegative = 0
    """Steps over which the learning rate rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global gradient norm."""
    train_layers: Positive | None = None
    """Train only the top N decoder blocks and the final norm; null: train all layers."""
    lora: AdapterConfig = AdapterConfig()
    tokens_per_microbatch: Positive | Auto = "auto"
    """Packing budget: tokens per forward pass and context rank. `auto`: 4,096 on a CPU; on a GPU what its memory holds
    beside the model. A model without packing takes one sequence of any length.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA when torch finds a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; master weights are float32. `auto`: `bfloat16` on a GPU, `float32` on a CPU; a run keeps the type
    that it began with.
    """
    attention: Literal["auto", "split", "flex"] = "auto"
    """Attention of packed sequences: `split` in pieces, on any device; `flex` by FlexAttention, compiled for a GPU;
    `auto`: `flex` on CUDA, `split` on a CPU.
    """
    threads: NonNegative = 0
    """CPU threads per rank; 0: torch's default."""
    activation_checkpointing: bool = False
    """Keep only the input of each decoder block and recompute the block in the backward pass: less memory,
    more time.
    """
    activation_offload: bool = False
    """Keep the inputs of checkpointed blocks in pinned CPU memory until the backward pass (CUDA only; with
    `activation_checkpointing`): memory for activations no longer grows with the number of blocks.
    """
    keep_gathered: bool = False
    """With several ranks, gather weights once per update, keep them until the last microbatch, and reduce gradients
    only then. Faster, if the whole model with its gradients fits in each rank's memory.
    """
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's moments in CPU memory, with one block at a time on the GPU (CUDA only)."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints to keep."""
    keep_best: str | None = None
    """A metric: also keep the checkpoint with its largest value, or with a leading `-` its smallest; null: none. A run
    may name a metric of its evaluations, such as `evaluation/default/reward`.
    """
    verify_checkpoint: bool = False
    """At a resume, compare all bytes of the checkpoint with the SHA-256 that were recorded when it was written. Sizes
    and the checkpoint's digest are always compared, and all bytes of a checkpoint that comes from object storage.
    """

    @model_validator(mode="after")
    def _one_part_is_trained(self) -> Self:
        if self.lora.rank and self.train_layers:
            raise ValueError("lora and train_layers cannot be combined")
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError("activation_offload needs activation_checkpointing: true")
        return self

    @property
    def token_budget(self) -> int:
        """`tokens_per_microbatch` as a number. A trainer first replaces `auto` (`trainer/run/trainer_start.py`)."""
        return CPU_TOKENS if self.tokens_per_microbatch == "auto" else self.tokens_per_microbatch

    @property
    def keeps_best_evaluated(self) -> bool:
        """Whether `keep_best` names a metric of evaluations."""
        return self.keep_best is not None and self.keep_best.removeprefix("-").partition("/")[0] in EVALUATED


CHANGEABLE_OF_TRAINER = (
    "resources.trainer.ranks",
    "resources.trainer.replicas",
    "resources.trainer.tensor",
    "resources.trainer.context",
    "resources.trainer.experts",
    "trainer.device",
    "trainer.threads",
    "trainer.attention",
    "trainer.tokens_per_microbatch",
    "trainer.activation_checkpointing",
    "trainer.activation_offload",
    "trainer.keep_gathered",
    "trainer.cpu_offload",
    "trainer.read_ahead_bytes",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.keep_best",
    "trainer.verify_checkpoint",
    "trainer.save_every",
    "trainer.keep_models",
    "trainer.alarms",
    "trainer.teacher_server.concurrent",
    "trainer.teacher_server.timeout_s",
    "trainer.teacher_server.attempts",
    "trainer.token_facts.every",
    "trainer.token_facts.sample",
    "trainer.profile_steps",
)
"""Keys of a trainer that may change on resume: they affect the execution but not the result."""


Bound = Annotated[float, Field(ge=-1e12, le=1e12)]


class AlarmConfig(Section):
    """A rule on one metric of the steps ([alarms](trainer.md#alarms))."""

    metric: Annotated[str, Field(min_length=1, max_length=200)]
    """Name of the metric, such as `entropy` ([metrics](metrics.md))."""
    below: Bound | None = None
    """The alarm sounds when the metric is less than this; null: use `above`."""
    above: Bound | None = None
    """The alarm sounds when the metric is more than this; null: use `below`."""
    of_first: bool = False
    """The bound is a factor of the metric's size in the run's first step."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of consecutive steps that must be beyond the bound."""
    does: Literal["warn", "stop"] = "warn"
    """`warn`: print and record it; `stop`: also save the step, and fail the run with the reason."""

    @model_validator(mode="after")
    def _there_is_one_bound(self) -> Self:
        if (self.below is None) == (self.above is None):
            raise ValueError(f"the alarm on {self.metric} needs one of below and above")
        return self


class AverageConfig(Section):
    """A running average of the policy's weights ([average](trainer.md#average-of-the-weights))."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.99
    """d in θ̄ ← d·θ̄ + (1 − d)·θ after each step: weights of 1/(1 − d) steps ago count 1/e as much as the newest."""


class NoiseScaleConfig(Section):
    """The noise scale of gradients, measured, and a learning rate that follows it ([noise
    scale](trainer.md#noise-scale-of-the-gradient)). Needs several microbatches for each optimizer update.
    """

    reference_batch: Positive | None = None
    """Trajectories of an optimizer update for which `lr` was chosen: the rate is adapted to the actual number, as the
    noise scale says. null: measure only.
    """
    power: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Power of the factor of the learning rate; for Adam 1/2 to 1."""
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Weight of the steps before in the running averages."""


class TokenFactsConfig(Section):
    """Facts of single tokens that the trainer keeps in the store: logprob, entropy, ratio, advantage, …"""

    every: NonNegative = 1
    """Steps between those whose facts are kept; 0: keep none."""
    sample: Positive | None = None
    """Number of trajectories of such a step, drawn at random; null: all."""


class TrainerConfig(UpdateConfig):
    """The policy update."""

    groups_per_step: Positive = 8
    """Number of groups in a batch."""
    max_staleness: NonNegative = 1
    """Maximum age of a trained token in weight versions (AReaL: max_head_offpolicyness)."""
    stale_policy: Literal["mask", "drop"] = "mask"
    """Treatment of older tokens: `mask` removes them from the loss; `drop` removes their trajectory and keeps its
    reward.
    """
    over_budget: Literal["compute", "refuse"] = "compute"
    """Treatment of a trajectory with more tokens than `tokens_per_microbatch` × `resources.trainer.context`: `compute`
    trains it in a microbatch of its own; `refuse` never trains its group, and another group takes the place.
    """
    minibatches: Positive = 1
    """Optimizer updates per step; the batch is split into whole groups."""
    algorithm: Algorithm = Algorithm()
    script: Annotated[list[str], Field(min_length=1)] | None = None
    """A Python file and its arguments: the trainer's ranks run it in place of the built-in loop ([training
    scripts](scripts.md)); null: the built-in loop.
    """
    lora: LoraConfig = LoraConfig()
    critic_lr: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate of a critic; it shares the other optimizer settings."""
    critic_lr_schedule: Schedule | None = None
    """Schedule of `critic_lr`; null: `lr_schedule`."""
    critic_warmup_steps: NonNegative = 0
    """First steps in which only the critic learns and the policy stays as it is."""
    critic_from: Path | None = None
    """Folder of a model that `agentrl reward-model` trained, with the architecture and the tokenizer of `model`: the
    critic starts with its body and its head; null: the base model's body, and a head of zeros.
    """
    reference: Path | None = None
    """Reference policy of `kl_coef`: a model folder, a checkpoint, or a folder in a run's `weights/` whose tensors
    replace the base model's; null: the base model.
    """
    teacher: Teachers | None = None
    """Teacher of `distill_coef`, with the tokenizer of `model`: a model folder or the name of a built-in model, which
    is loaded beside the policy; `policy`, the policy itself (with `teacher_prompt`); the URL of an SGLang server, or
    `upstream:NAME` for one of `proxy.upstreams`. Or a teacher for each source of `tasks`, as `SOURCE: TEACHER`; tasks
    of other sources are not distilled.
    """
    teacher_prompt: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Replaces a trajectory's first prompt for the teacher ([privileged prompts](algorithms.md#privileged-prompts)). A
    `module:function` is called with the task and the prompt's messages, and returns others; the name of a field of the
    task adds its text after the last user message. null: the teacher reads the policy's prompt.
    """
    teacher_server: TeacherServerConfig = TeacherServerConfig()
    routing_replay: Literal["off", "engine"] = "off"
    """Experts of a mixture-of-experts model: `off`: the trainer's routers choose; `engine`: engines report the experts
    that they chose, and the policy's passes use them ([mixtures](trainer.md#mixtures-of-experts)).
    """
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of a mixture's routers; 0: none."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss or gradient: `stop` fails the run, `skip` leaves out the minibatch. An event names the
    trajectories.
    """
    alarms: Annotated[list[AlarmConfig], Field(max_length=32)] = Field(default_factory=list)
    """Rules that warn or stop the run when a metric leaves its bounds."""
    token_facts: TokenFactsConfig = TokenFactsConfig()
    profile_steps: list[Positive] = Field(default_factory=list)
    """Steps whose update is profiled by torch.profiler, into `profiles/` of the run's folder: a trace for Perfetto from
    each rank. A profiled step is slower.
    """
    stop_timeout_s: Seconds = 600.0
    """Time after Ctrl-C in which the trainer can finish and save the current step. A second Ctrl-C kills it; a resume
    then repeats the step.
    """
    read_ahead_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Memory of each rank for tokens of the next batch, which are read while a step runs; 0: none are. A token has 8
    bytes, and more with recorded experts.
    """
    checkpoint_every: Positive | Auto = "auto"
    """Steps between durable checkpoints. A resume rolls back the steps after the newest one and trains them again.
    `auto`: so that writing takes at most a twentieth of the time, and at least every 50th step. With 1 a step is
    complete when its checkpoint is durable; otherwise checkpoints are written while the next steps run.
    """
    save_every: Positive | None = None
    """Steps between Hugging Face folders of the model, `models/step-000100` in the run's folder, which are written from
    the step's checkpoint beside the next steps; null: only `model/`, at the end.
    """
    keep_models: Positive | None = None
    """Number of newest folders in `models/` to keep; null: all."""
    average: AverageConfig | None = None
    """Keep a running average of the weights in the checkpoints, for `agentrl export --average`. It takes the memory of
    one float32 copy of the trained weights, divided among the ranks as they are; null: none is kept.
    """

    noise_scale: NoiseScaleConfig | None = None
    """Measure the noise scale of the policy's gradient; null: no."""

    @model_validator(mode="after")
    def _gradients_are_reduced_in_between(self) -> Self:
        if self.noise_scale is not None and self.keep_gathered:
            raise ValueError("noise_scale needs the gradient of the first microbatch: set keep_gathered to false")
        return self

    @model_validator(mode="after")
    def _critic_is_asked_for(self) -> Self:
        if self.critic_warmup_steps and not self.algorithm.needs_critic:
            raise ValueError("critic_warmup_steps needs an algorithm with a critic (ppo)")
        if self.critic_from is not None and not self.algorithm.needs_critic:
            raise ValueError("critic_from needs an algorithm with a critic (ppo)")
        return self

    @model_validator(mode="after")
    def _teacher_is_asked_for(self) -> Self:
        if bool(self.algorithm.distill_coef) != (self.teacher is not None):
            raise ValueError("teacher and an algorithm.distill_coef above 0 go together")
        if self.teacher_prompt is not None and self.teacher is None:
            raise ValueError("teacher_prompt needs a teacher")
        teachers = teachers_of(self.teacher)
        if POLICY in teachers and self.teacher_prompt is None:
            raise ValueError(
                f"teacher: {POLICY} needs a teacher_prompt: reading the same prompt, the policy teaches itself nothing"
            )
        asked = next((teacher for teacher in teachers if is_server(teacher)), None)
        if asked is not None and self.algorithm.compares_vocabularies:
            raise ValueError(
                f"teacher: {asked} is a server, which scores sampled tokens only: algorithm.distill: full needs a "
                "model that the trainer loads"
            )
        return self

    @property
    def prompts_by_function(self) -> bool:
        """Whether `teacher_prompt` is `module:function`."""
        return self.teacher_prompt is not None and FUNCTION.match(self.teacher_prompt) is not None

    @model_validator(mode="after")
    def _reference_is_asked_for(self) -> Self:
        if self.reference and not self.algorithm.needs_reference:
            raise ValueError("reference needs an algorithm.kl_coef above 0")
        return self
