"""The configuration of a run: its sections and its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl.configs.engine_config import EngineConfig
from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.configs.episodes.task_sources import Tasks, sources_of
from agentrl.configs.episodes.teachers import UPSTREAM, is_server, teachers_of
from agentrl.configs.evaluation_config import EvalConfig
from agentrl.configs.metrics_config import MetricsConfig
from agentrl.configs.proxy_config import ProxyConfig
from agentrl.configs.publish_config import PublishConfig, StorageConfig
from agentrl.configs.resources_config import Resources
from agentrl.configs.rollout_config import RolloutConfig
from agentrl.configs.section import NonNegative, Positive, Section
from agentrl.configs.slurm_config import SlurmConfig
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import did_you_mean


class RunConfig(Section):
    """A run, as started by `agentrl train`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's name, and its folder under `runs_dir`."""
    model: str
    """`smollm2`, `tiny` (both built from installed packages), or a local Hugging Face folder."""
    agent: str | list[str] | None = None
    """`module:Class` with `async def run(self, data, **extra)`, a [ready-made agent](rewards.md#agents) (`single_turn`,
    `multi_turn`, [`tool_agent`](tools.md)), or a command as a list; null: `single_turn` with `reward`, else other
    programs run agents.
    """
    agent_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the agent class."""
    tasks: Tasks | None = None
    """Training tasks ([tasks](tasks.md)): a file, a folder, a dataset or `module:function`, the section
    [`tasks`](#tasks), or a list of such sources; null: programs bring their own tasks.
    """
    steps: NonNegative = 10
    """Total optimizer steps of the run. 0: train nothing and record any number of sessions."""
    epochs: Positive | None = None
    """Passes over `tasks`, in place of `steps`: the run has as many steps as groups of all tasks fill, and starts when
    all tasks are stored. null: `steps` counts.
    """
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seeds the order of tasks, new weights, dropout, and each engine that the run starts (for other engines: `agentrl
    engine --seed`). Calls reach an engine in varying order, so two runs with one seed are similar but not equal;
    `engine.deterministic` makes samples independent of that order ([two runs of one
    seed](asynchrony.md#two-runs-of-one-seed)).
    """
    runs_dir: Path = Path("runs")
    """Parent folder of the runs' folders."""
    database_url: str | None = None
    """SQLAlchemy URL; null: AGENTRL_DATABASE_URL, else the URL of the last start, else SQLite in the run's folder."""
    max_restarts: NonNegative = 5
    """The run fails when a process (engine, proxy, trainer, rollout worker) dies more often than this in
    ten minutes.
    """
    placement: Literal["local", "ray", "slurm", "kubernetes"] = "local"
    """Who places the run's processes: `agentrl train` on this machine, Ray on the hosts of its cluster, a Slurm job,
    or manifests of Kubernetes. Other placements than local need PostgreSQL and a `runs_dir` that all hosts share.
    """
    slurm: SlurmConfig = SlurmConfig()
    resources: Resources = Resources()
    engine: EngineConfig = EngineConfig()
    proxy: ProxyConfig = ProxyConfig()
    reward: RewardConfig | None = None
    """How answers are scored: `module:function`, or the section [`reward`](#reward); null: agents return their rewards.
    """
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    publish: PublishConfig = PublishConfig()
    storage: StorageConfig = StorageConfig()
    evaluation: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _one_machine_holds_what_is_local(self) -> RunConfig:
        sizes = self.resources
        counts = {
            "engines.hosts": sizes.engines.hosts,
            "trainer.hosts": sizes.trainer.hosts,
            "proxies": sizes.proxies,
        }
        for name, count in counts.items():
            if self.placement == "local" and count > 1:
                raise ValueError(f"resources.{name}: {count} needs a placement other than local, for example ray")
        return self

    @model_validator(mode="after")
    def _passes_need_tasks(self) -> RunConfig:
        if self.epochs is not None and self.tasks is None:
            raise ValueError("epochs: needs `tasks`; use `steps` where programs bring their own tasks")
        return self

    @model_validator(mode="after")
    def _schedulers_give_parts_gpus_of_their_own(self) -> RunConfig:
        if self.placement != "local" and self.resources.colocated:
            raise ValueError(
                f"resources.colocated: true is not possible with placement {self.placement}, which gives each part "
                "GPUs of its own: write false, or + instead of | in resources.allocation"
            )
        return self

    @model_validator(mode="after")
    def _upstreams_do_not_hide_the_policy(self) -> RunConfig:
        for name in self.proxy.upstreams:
            if name in (self.name, "default"):
                raise ValueError(f"proxy.upstreams.{name}: the name is reserved for the policy")
        return self

    @model_validator(mode="after")
    def _stored_weights_are_whole(self) -> RunConfig:
        lora = self.trainer.lora
        if self.storage.weights and lora.rank and lora.publish == "adapter":
            raise ValueError("storage.weights: engines read adapters from the run's folder: set lora.publish: merged")
        return self

    @model_validator(mode="after")
    def _the_best_is_evaluated(self) -> RunConfig:
        if self.trainer.keeps_best_evaluated and not self.is_evaluated:
            raise ValueError(
                f"trainer.keep_best: {self.trainer.keep_best} needs evaluations: set evaluation.tasks or unseen_tasks"
            )
        return self

    @model_validator(mode="after")
    def _replays_can_be_young(self) -> RunConfig:
        if self.rollout.replay is not None and self.steps and not self.trainer.max_staleness:
            raise ValueError(
                "rollout.replay: trains tokens that are at least one version old; set trainer.max_staleness to at "
                "least 1"
            )
        return self

    @model_validator(mode="after")
    def _samples_are_chosen_by_a_known_score(self) -> RunConfig:
        best_of = self.evaluation.best_of
        own_agent = not (self.agent is None or (isinstance(self.agent, str) and ":" not in self.agent))
        if best_of is None or self.reward is None or own_agent:
            return self  # such agents name rewards and numbers themselves
        functions = self.reward.functions
        for field, name in [("by", best_of.by), *[("rewards", name) for name in best_of.rewards or ()]]:
            counted = [known for known, one in functions.items() if field == "by" or one.weight]
            if not any(name == known or name.startswith(f"{known}.") for known in counted):
                raise ValueError(
                    f"evaluation.best_of.{field}: no component of reward is called {name!r}"
                    f"{did_you_mean(name, counted)}; there are {', '.join(counted)}"
                )
        if best_of.rewards is None and not any(one.weight for name, one in functions.items() if name != best_of.by):
            raise ValueError(
                f"evaluation.best_of.by: {best_of.by!r} is the only reward, so the choice would be judged by its own "
                "score (best@k is reported in any case): add a component that judges"
            )
        return self

    @model_validator(mode="after")
    def _lag_is_within_the_staleness(self) -> RunConfig:
        lag, bound = self.publish.lag, self.trainer.max_staleness
        if self.steps and lag > bound:
            raise ValueError(
                f"publish.lag: {lag} is more than trainer.max_staleness: {bound}: engines would sample tokens that are "
                "too old to train; lower publish.lag or raise trainer.max_staleness"
            )
        if lag and self.publish.transport != "disk":
            raise ValueError(
                "publish.lag: needs publish.transport: disk, since the other transports reach all engines at once"
            )
        if lag and self.trainer.lora.publish == "adapter" and self.trainer.lora.rank:
            raise ValueError("publish.lag: needs whole weights; an adapter changes without a pause: set it to 0")
        return self

    @model_validator(mode="after")
    def _teachers_are_known(self) -> RunConfig:
        teacher, upstreams = self.trainer.teacher, self.proxy.upstreams
        for one in teachers_of(teacher):
            name = one.removeprefix(UPSTREAM)
            if name != one and name not in upstreams:
                raise ValueError(
                    f"trainer.teacher: no upstream {name!r} in proxy.upstreams{did_you_mean(name, upstreams)}"
                )
        heat = self.rollout.sampling.temperature
        asked = next((one for one in teachers_of(teacher) if is_server(one)), None)
        if asked is not None and heat not in (None, 1):
            raise ValueError(
                f"trainer.teacher: {asked} is a server, which scores at temperature 1 only: set "
                f"rollout.sampling.temperature to 1, not {heat:g}"
            )
        if isinstance(teacher, dict):
            known = [source.label for source in sources_of(self.tasks)]
            if not known:
                raise ValueError("trainer.teacher: a teacher for each source needs `tasks`, whose sources it names")
            for source in teacher:
                if source not in known:
                    raise ValueError(f"trainer.teacher: no source {source!r} in tasks{did_you_mean(source, known)}")
        return self

    @model_validator(mode="after")
    def _groups_have_as_many_as_the_objective_counts(self) -> RunConfig:
        algorithm, size = self.trainer.algorithm, self.rollout.least_group_size
        if self.steps and algorithm.baseline == "max_at_k" and algorithm.best_of > size:
            field = "group_size" if self.rollout.adaptive_group is None else "adaptive_group.least"
            raise ValueError(
                f"trainer.algorithm.best_of: {algorithm.best_of} is more than rollout.{field}: {size}; "
                "the maximum of best_of episodes is estimated from one group"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """The run's folder, `runs_dir/name`."""
        return self.runs_dir / self.name

    @property
    def runs_agents(self) -> bool:
        """Whether rollout workers run an agent of the run."""
        return self.agent is not None or self.reward is not None

    @property
    def is_evaluated(self) -> bool:
        """Whether the run's own agent is evaluated on held-out tasks."""
        evaluation = self.evaluation
        return self.runs_agents and (evaluation.tasks is not None or evaluation.unseen_tasks is not None)

    @property
    def cautions(self) -> list[str]:
        """One line for each valid setting that rarely does what the user wants, printed when a run starts."""
        discount, algorithm = self.rollout.turn_discount, self.trainer.algorithm
        found = []
        # Only a critic has a baseline per turn; all others have one per episode.
        if discount != 1 and algorithm.credit == "turn" and algorithm.estimator == "returns" and self.steps:
            found.append(
                f"caution: rollout.turn_discount {discount:g} with trainer.algorithm.credit turn: when a group's "
                "episodes differ in their number of turns, the last turns of all episodes get a large positive "
                "advantage, also those of worse episodes; turn_discount: 1 or credit: trajectory avoids this "
                "(docs/algorithms.md, Discounted turns)"
            )
        teacher = self.trainer.teacher
        if isinstance(teacher, dict) and not algorithm.reward_weight and self.steps:
            idle = [source.label for source in sources_of(self.tasks) if source.label not in teacher]
            if idle:
                found.append(
                    f"caution: trainer.algorithm.reward_weight 0: nothing is learned from tasks of {', '.join(idle)}, "
                    "which have no teacher in trainer.teacher (docs/algorithms.md, Teachers of single sources)"
                )
        return found
