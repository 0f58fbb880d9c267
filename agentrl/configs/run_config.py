"""A run's configuration: strict, frozen, one class per part. `load_config` reads YAML and `section.key=value`."""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.section import Section
from agentrl.errors import ConfigError, did_you_mean

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output head."""
MAX_REWARD = 1e6
"""Largest |value| of a reward, where a run does not say otherwise (`proxy.max_reward`)."""


class SamplingConfig(Section):
    """How training sessions sample. The defaults keep the recorded logprobs exact (no top-p, top-k, penalties)."""

    temperature: Annotated[float, Field(gt=0, le=2)] | None = None
    """Softmax temperature, forced on training sessions so that an agent that asks for 0 still explores; 1 unless given.
    A run that only records (`steps: 0`) samples as its programs ask, unless this is given."""
    max_tokens: Positive | None = None
    """Upper bound on new tokens of one call; the agent may ask for fewer."""


class EngineConfig(Section):
    """SGLang servers that `agentrl train` starts."""

    count: Positive = 1
    """How many servers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where torch sees a GPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Weights and activations of the engines, of those in `urls` too; what is published to them has it."""
    max_total_tokens: Positive = 16384
    """Key/value cache size, in tokens."""
    max_running_requests: Positive = 64
    """Requests decoded together; more wait in the engine's queue."""
    start_timeout_s: Seconds = 300.0
    """The run fails when any of the servers that it starts does not serve after this long, at each of its starts; of
    those in `urls`, when none does."""
    urls: list[str] = Field(default_factory=list)
    """Servers that already run; when given, none is started. Their keys are in AGENTRL_ENGINE_KEY."""
    extra_args: list[str] = Field(default_factory=list)
    """Passed to `sglang.launch_server` as they are."""

    @field_validator("urls")
    @classmethod
    def _are_plain_addresses(cls, value: list[str]) -> list[str]:
        return [plain_address(url, "; use AGENTRL_ENGINE_KEY") for url in value]


def plain_address(value: str, instead: str = "") -> str:
    """An HTTP address without a slash at its end. Raises ValueError for anything else, and for one with a password."""
    parts = urlsplit(value)
    if "@" in value:
        raise ValueError(f"must not hold a password: it is stored with the run{instead}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"must be http://HOST… or https://HOST… without a query, got {value!r}")
    return value.rstrip("/")


class UpstreamConfig(Section):
    """Another model beside the policy, for example a judge: calls that name it are passed on and recorded."""

    base_url: str
    """Where it is served, `/v1` included (`https://api.openai.com/v1`, `https://api.anthropic.com/v1`)."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """What it is called there; null: as it is called here."""
    api_key_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable of the proxy that holds the key; null sends none. The key itself is stored nowhere."""
    timeout_s: Seconds = 600.0
    """Deadline of one call."""

    @field_validator("base_url")
    @classmethod
    def _is_a_plain_address(cls, value: str) -> str:
        return plain_address(value, "; use api_key_env")


class ProxyConfig(Section):
    """The recording proxy."""

    host: str = "127.0.0.1"
    """Address to listen on. Off loopback an admin key must be set."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0 picks a free one."""
    public_url: str | None = None
    """Where clients reach the proxy, `https://agents.example.org` say: the beginning of every URL in its answers. null:
    what the client's Host header says, if that is an IP address, `localhost`, this machine's name or allowed."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Other host names that a Host header may say, without a port."""
    workers: Positive = 1
    """Processes that serve the port; each is a replica of its own."""
    metrics_public: bool = False
    """`/metrics` needs no key; else a run or admin key."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one model call, waiting for an engine included."""
    retry_grace_s: Annotated[float, Field(ge=0)] = 30.0
    """How long an answer is sampled on after its client left, so that a retry gets it. 0 stops at once."""
    restore_dropped_text: bool = False
    """A tool call that comes back without the text that was sampled beside it, and is otherwise the same with the same
    id, stands for the recorded turn: the prompt then has the text that the client dropped. Else such a call forks."""
    max_body_bytes: Positive = 32 * 1024 * 1024
    """Larger requests are refused with 413."""
    body_timeout_s: Seconds = 60.0
    """A request whose body has not arrived after this long is refused with 408."""
    max_concurrent_calls: Positive = 4096
    """Answers that one process of the proxy samples at once; while there are as many, calls get 429."""
    max_concurrent_calls_per_session: Positive = 512
    """The same for one session with its sub-agents', and the most answers that a request may ask for (`n`, prompts)."""
    max_calls_per_session: Positive | None = None
    """Model calls of one session with its sub-agents' sessions, those of other models included; then they are refused
    with 403, `session_limit_reached`. null: any number."""
    max_tokens_per_session: Positive | None = None
    """Sampled tokens, counted alike; once there are as many, calls are refused in the same way. null: any number."""
    max_subagent_depth: NonNegative = 8
    """Levels of sub-agents' sessions below a session; deeper ones are refused with 422. 0: none."""
    max_subagents_per_session: NonNegative = 256
    """Sub-agents' sessions below a root session, on all levels together; more are refused with 422."""
    session_timeout_s: Seconds = 900.0
    """An open session of an outside program that made no call and sent no heartbeat for this long is abandoned."""
    heartbeat_timeout_s: Seconds = 60.0
    """A rollout worker that sent no heartbeat for this long is dead, and its sessions are abandoned; a silent proxy
    replica too, and its calls are lost."""
    session_max_s: Seconds = 86400.0
    """A session that is open for this long fails, whatever it does."""
    reward_timeout_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an ended session without any reward waits for one before it is rejected."""
    max_reward: Annotated[float, Field(gt=0, le=1e12)] = MAX_REWARD
    """Rewards beyond ± this are refused with 422, however they come in."""
    end_grace_s: Seconds = 30.0
    """How long an ended session waits for its running calls before its trajectories are built."""
    upstreams: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")], UpstreamConfig] = Field(
        default_factory=dict
    )
    """Other models that calls may name, by the name that calls use."""
    named_sessions: bool = False
    """A model call with a run key and an `X-Session-ID` that is not known opens a session of that name."""
    model_aliases: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Names besides the run's and `default` that reach the policy, as shell patterns: `["claude-*", "gpt-*"]` for
    programs that name a model of their provider. An upstream of that name goes first. A judge by such a name would be
    the policy."""
    clip_max_tokens: bool = False
    """A call that asks for more tokens than the context has room for gets what room there is, and ends with `length`;
    else it is refused. Anthropic's dialect clips always, as Anthropic does: its clients must ask for a number."""

    @field_validator("public_url")
    @classmethod
    def _is_a_plain_address(cls, value: str | None) -> str | None:
        return None if value is None else plain_address(value)


class RolloutConfig(Section):
    """How agents run."""

    group_size: Positive = 8
    """Sessions per task."""
    min_group_size: Positive = 2
    """A group with failed sessions is trained if this many remain."""
    max_concurrent_groups: Positive = 16
    """Groups that may run at once, over all workers."""
    timeout_s: Seconds = 300.0
    """One episode; a slower one fails."""
    max_failures_in_a_row: Positive | None = 256
    """When this many sessions have failed one after another, evaluations' too, the run is stopped as failed, with the
    last error; `agentrl run reopen`, or `agentrl train` again, lets it go on. null: it never is."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """γ in R_i = r_i + γ·R_{i+1} over the calls of a session."""
    sampling: SamplingConfig = SamplingConfig()

    @model_validator(mode="after")
    def _a_group_can_be_large_enough(self) -> RolloutConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is more than group_size {self.group_size}: no group could train"
            )
        return self


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


class WandbConfig(Section):
    """A run of Weights & Biases (needs the extra `wandb`; the key is in WANDB_API_KEY, or `wandb login` keeps it)."""

    project: Annotated[str, Field(min_length=1)]
    """Its project there."""
    entity: Annotated[str, Field(min_length=1)] | None = None
    """User or team that the project is of; null: your own."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run's folder alone, for `wandb sync`."""


class TrackioConfig(Section):
    """A run of trackio (needs the extra `trackio`)."""

    project: Annotated[str, Field(min_length=1)]
    """Its project; `trackio show` shows it."""
    space_id: Annotated[str, Field(min_length=1)] | None = None
    """Hugging Face Space that it is logged to, `USER/SPACE`; null: this machine."""


class MetricsConfig(Section):
    """Where the metrics of every step go besides the store and the terminal."""

    tensorboard: bool = False
    """Write event files to `runs/NAME/tensorboard` (needs the extra `tensorboard`)."""
    wandb: WandbConfig | None = None
    """Weights & Biases; null: no."""
    trackio: TrackioConfig | None = None
    """trackio; null: no."""


class EvalSampling(Section):
    """One way to sample in an evaluation, by the name that its results get; null: as the agent asks. The first is the
    main one. Any that are given replace the default two: `sampled` at temperature 1, `greedy` at 0."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Softmax temperature; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Annotated[int, Field(gt=0, le=2**30)] | None = None
    """Sample from the N likeliest tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Sample from the tokens that are at least this times as likely as the likeliest."""
    max_tokens: Positive | None = None
    """Upper bound on new tokens of one call; the agent may ask for fewer."""


UNSEEN = "unseen"
"""The setting under which `unseen_tasks` are played."""


class EvalConfig(Section):
    """Held-out evaluation: of the base weights, every few steps, and of the last step ([evaluation](evaluation.md))."""

    tasks: str | None = None
    """JSONL file or `module:function` that yields held-out tasks, played in every setting; null: none."""
    size: Positive = 64
    """The first N tasks are used."""
    unseen_tasks: str | None = None
    """A second task set, with phrasings that training never shows; sampled as the first setting says."""
    samples: Positive = 1
    """Episodes of each task in each setting; a task counts with their mean."""
    every: Positive | None = None
    """Steps between evaluations; null evaluates only before the first step and after the last."""
    hold: bool = False
    """Publish no weights while those that are served are evaluated: then one version samples it, and training waits."""
    hold_timeout_s: Seconds = 3600.0
    """Publish all the same after this long."""
    max_concurrent: Positive = 32
    """Episodes that one worker plays at once."""
    settings: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")], EvalSampling], Field(min_length=1)
    ] = Field(
        default_factory=lambda: {"sampled": EvalSampling(temperature=1.0), "greedy": EvalSampling(temperature=0.0)}
    )
    """How episodes are sampled, by name."""

    @model_validator(mode="after")
    def _no_setting_is_called_unseen(self) -> EvalConfig:
        if self.unseen_tasks is not None and UNSEEN in self.settings:
            raise ValueError(f"settings.{UNSEEN}: unseen_tasks are played under that name")
        return self

    @property
    def main_setting(self) -> str:
        """The setting that one figure is taken from."""
        return next(iter(self.settings))


class PublishConfig(Section):
    """How engines get new weights. An adapter that is published as such always comes from its folder."""

    transport: Literal["disk", "distributed", "tensor"] = "disk"
    """`disk`: from a folder that they share with the trainer, one after another; `distributed`: the trainer broadcasts
    to all of them at once, over gloo or NCCL; `tensor`: through the memory of a host that they share with the trainer.
    Where the last two fail, from the folder."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of running calls: `retract`: they go on with the new weights, their prefix computed again;
    `in_place`: with what is in the cache, computed by the old weights; `abort`: they are resubmitted by the proxy."""
    bucket_bytes: Annotated[int, Field(ge=1024)] = 256 * 1024 * 1024
    """Tensors are sent in buckets of about so many bytes."""
    timeout_s: Seconds = 60.0
    """An engine that has not taken a bucket after so long reads the folder."""
    update_timeout_s: Seconds = 180.0
    """An engine that takes longer for all of it, the folder too, has failed: it does not serve before it has it."""
    verify: bool = True
    """Compare digests of the engines' weights with the trainer's before they go on. Only engines of one rank on a CPU
    tell digests that the trainer can compute; of others nothing is compared, which each publish says (`unverified`)."""


class RunConfig(Section):
    """A whole run: what `agentrl train` starts."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's name and folder under `runs_dir`."""
    model: str
    """`smollm2`, `tiny` (made from what the installed packages ship), or a local Hugging Face folder."""
    agent: str | list[str] | None = None
    """`module:Class` with `async def run(self, data, **extra)`, or a command as a list; null: others play."""
    agent_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent class."""
    tasks: str | None = None
    """JSONL file or `module:function` that yields the training tasks; null: programs bring their own."""
    steps: NonNegative = 10
    """Optimizer steps of the whole run; with 0 nothing is trained, and any number of sessions is recorded."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seeds task order, initialisation, and each engine that is started here (others: `agentrl engine --seed`). Calls
    reach an engine in the order of the moment, so that two runs of one seed are alike, not equal."""
    runs_dir: Path = Path("runs")
    """Where run folders live."""
    database_url: str | None = None
    """SQLAlchemy URL; null takes AGENTRL_DATABASE_URL, else SQLite in the run's folder."""
    max_restarts: NonNegative = 5
    """A part (engine, proxy, trainer, rollout worker) that dies more often than this in ten minutes fails the run."""
    engine: EngineConfig = EngineConfig()
    proxy: ProxyConfig = ProxyConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    publish: PublishConfig = PublishConfig()
    evaluation: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _upstreams_do_not_hide_the_policy(self) -> RunConfig:
        for name in self.proxy.upstreams:
            if name in (self.name, "default"):
                raise ValueError(f"proxy.upstreams.{name}: the policy has that name")
        return self

    @property
    def run_dir(self) -> Path:
        """`runs_dir/name`."""
        return self.runs_dir / self.name

    @property
    def is_evaluated(self) -> bool:
        """Whether its own agent plays held-out tasks."""
        evaluation = self.evaluation
        return self.agent is not None and (evaluation.tasks is not None or evaluation.unseen_tasks is not None)


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read YAML from `path`, apply `section.key=value` overrides (values are YAML), validate.

    Raises ConfigError, one line, naming the field and the nearest valid key.
    """
    return parse_config(read_config(path, overrides))


def read_config(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """The mapping in a YAML file with overrides applied, not validated yet. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, got {type(data).__name__}")
    for item in overrides or []:
        apply_override(data, item)
    return data


def apply_override(data: dict[str, Any], item: str) -> None:
    """Set `a.b=value` in nested mappings. Raises ConfigError when `item` has no `=` or walks into a value.

    `trainer.algorithm` may be a preset's name: `trainer.algorithm.clip_high=0.28` then changes a part of that preset.
    """
    key, sep, raw = item.partition("=")
    if not sep or not key:
        raise ConfigError(f"override {item!r} must look like section.key=value")
    *parents, leaf = key.split(".")
    node = data
    for part in parents:
        child = node.setdefault(part, {})
        if part == "algorithm" and isinstance(child, str):
            child = node[part] = {"preset": child}
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {part!r} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: {raw!r} is not a YAML value") from error


def parse_config(data: dict[str, Any]) -> RunConfig:
    """Validate a mapping. Raises ConfigError naming the first bad field."""
    return validated(data, RunConfig)


Root = TypeVar("Root", bound=Section)


def validated(data: dict[str, Any], kind: type[Root]) -> Root:
    """A mapping as a configuration of `kind`. Raises ConfigError naming the first bad field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"unknown config key {where!r}{did_you_mean(str(first['loc'][-1]), _keys_at(kind, first['loc'][:-1]))}"
            ) from None
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])
            raise ConfigError(
                f"config key {where!r}: there is no {first['input']!r}{did_you_mean(first['input'], choices)}"
            ) from None
        raise ConfigError(f"config key {where!r}: {first['msg']}") from None


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, or may hold."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _keys_at(kind: type[Section], path: tuple[int | str, ...]) -> list[str]:
    found: Any = kind
    for part in path:
        found = get_args(found)[1] if get_origin(found) is dict else found.model_fields[str(part)].annotation
        found = section_of(found) or found
    assert issubclass(found, BaseModel)
    return list(found.model_fields)
