"""Configurations of `agentrl sft`, `dpo` and `reward-model`. Keys shared with a run have the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, model_validator

from agentrl.configs.config_files import read_config, validated
from agentrl.configs.resources_config import TuningResources
from agentrl.configs.section import NonNegative, Positive, Section
from agentrl.configs.trainer_config import CHANGEABLE_OF_TRAINER, UpdateConfig
from agentrl.environment import without_password
from agentrl.errors import ConfigError

State = Literal["ready", "leased", "trained", "stale", "rejected"]

CHANGEABLE = (
    "steps",
    "epochs",
    "runs_dir",
    "data.file",
    "data.database_url",
    *CHANGEABLE_OF_TRAINER,
)
"""Keys that may change on resume. A digest checks that the data stay the same."""


class DataConfig(Section):
    """The data: a file, or the trajectories of a run. Exactly one of `file` and `run` is required."""

    file: Path | None = None
    """JSONL or Parquet file, one item per row."""
    run: str | None = None
    """Name or folder of a run whose recorded token ids to use."""
    database_url: str | None = None
    """Database of that run; null: AGENTRL_DATABASE_URL, else the database in the run's folder."""
    states: Annotated[tuple[State, ...], Field(min_length=1)] = ("ready", "leased", "trained", "stale")
    """Use only trajectories in these states."""
    min_version: NonNegative | None = None
    """Use only trajectories whose trained tokens all have at least this weight version."""
    max_version: NonNegative | None = None
    """Use only trajectories whose trained tokens all have at most this weight version."""
    min_reward: float | None = None
    """Use only trajectories of episodes with at least this return; for pairs, the chosen trajectory counts."""
    max_tokens: Positive | None = None
    """Leave out longer items; null: the model's context length."""
    held_out: NonNegative = 0
    """Number of items to hold out. They are scored before the first step and at each checkpoint."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.run is None):
            raise ValueError("give either file or run")
        if self.file is not None:
            for key in type(self).model_fields.keys() - {"file", "run", "max_tokens", "held_out"}:
                if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                    raise ValueError(f"{key} applies to a run's trajectories, not to a file")
        return self


class SftDataConfig(DataConfig):
    """The conversations: a file, or the trajectories of a run."""

    best_of_group: Positive | None = None
    """Use only the N best episodes of each group, the first among equals; null: all."""
    upstream: Annotated[str, Field(min_length=1)] | None = None
    """Use the answers of this upstream (`proxy.upstreams`) in the run, in place of the policy's; null: the policy's."""

    @model_validator(mode="after")
    def _upstreams_have_no_versions(self) -> Self:
        if self.upstream is not None:
            for key in ("states", "min_version", "max_version"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} applies to the policy's trajectories, not to the answers of an upstream")
        return self


class PairDataConfig(DataConfig):
    """The pairs: a file, or the trajectories of a run, paired within their groups by reward."""

    pairs_per_group: Positive = 1
    """Maximum pairs per group: the best with the worst, the second best with the second worst, …"""
    min_margin: Annotated[float, Field(ge=0)] = 0.0
    """Leave out pairs whose returns differ by less. Equal returns never form a pair."""


class TuningTrainerConfig(UpdateConfig):
    """The optimizer and the execution of the updates."""

    batch_size: Positive = 32
    """Items (conversations, trajectories, pairs) per optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate of AdamW."""
    checkpoint_every: Positive = 50
    """Steps between durable checkpoints. The last step and an interrupted run always write one."""


class TuningConfig(Section):
    """Settings shared by the three methods."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder under `runs_dir`."""
    model: str
    """`smollm2`, `tiny`, or a local Hugging Face folder."""
    epochs: Positive = 1
    """Passes over the data."""
    steps: Positive | None = None
    """Optimizer steps; null: as many as `epochs` needs."""
    seed: int = 0
    """Seeds the order of the items, the held-out items, and a new head or adapter."""
    runs_dir: Path = Path("runs")
    """Parent folder of the runs' folders."""
    resources: TuningResources = TuningResources()
    trainer: TuningTrainerConfig = TuningTrainerConfig()

    @property
    def run_dir(self) -> Path:
        """The run's folder, `runs_dir/name`."""
        return self.runs_dir / self.name


class SftConfig(TuningConfig):
    """`agentrl sft`: fine-tune on the assistant turns of conversations."""

    method: Literal["sft"] = "sft"
    """The command that this file is for."""
    loss: Literal["cross_entropy", "forward_kl"] = "cross_entropy"
    """`cross_entropy`: −log π of each trained token; `forward_kl`: KL(q ‖ π) where the likeliest tokens of q, the model
    that sampled, were recorded (`rollout.top_logprobs`), and cross-entropy elsewhere ([distillation from a
    run](tuning.md#distillation-from-a-run)).
    """
    data: SftDataConfig

    @model_validator(mode="after")
    def _distributions_are_recorded(self) -> Self:
        if self.loss == "forward_kl" and self.data.run is None:
            raise ValueError("loss: forward_kl needs data.run: a file has no distributions")
        if self.loss == "forward_kl" and self.data.upstream is not None:
            raise ValueError("loss: forward_kl needs token ids with their distributions, and an upstream gives text")
        if self.loss == "forward_kl" and self.resources.trainer.context > 1:
            raise ValueError("loss: forward_kl is not possible with resources.trainer.context above 1")
        return self


class PairConfig(TuningConfig):
    """Settings shared by the methods that train on pairs."""

    data: PairDataConfig


class DpoConfig(PairConfig):
    """`agentrl dpo`: direct preference optimization on pairs of answers."""

    method: Literal["dpo"] = "dpo"
    """The command that this file is for."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: −log σ(βh); `ipo`: (h − 1/(2β))², h per token."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β: strength of the pull towards the base model."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels (`sigmoid`)."""

    @model_validator(mode="after")
    def _smoothing_has_a_meaning(self) -> Self:
        if self.loss_type == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing needs loss_type: sigmoid")
        return self


class RewardModelConfig(PairConfig):
    """`agentrl reward-model`: train a scalar score that is higher for the chosen answer of a pair."""

    method: Literal["reward-model"] = "reward-model"
    """The command that this file is for."""


Kind = TypeVar("Kind", SftConfig, DpoConfig, RewardModelConfig)
AnyConfig = SftConfig | DpoConfig | RewardModelConfig


def load(path: Path, overrides: list[str] | None, kind: type[Kind]) -> Kind:
    """Read YAML, apply `section.key=value` overrides, and validate. Raises ConfigError: one line with the field."""
    return validated(read_config(path, overrides), kind)


def stored(config: AnyConfig) -> dict[str, Any]:
    """The configuration as stored in the run's folder: all fields, without a database's password."""
    data = config.model_dump(mode="json")
    if data["data"]["database_url"] is not None:
        data["data"]["database_url"] = without_password(data["data"]["database_url"])
    return data


def keep(config: AnyConfig) -> None:
    """Write `config.yaml` to the run's folder. Raises ConfigError when a resume changes what the run computes."""
    path = config.run_dir / "config.yaml"
    if path.is_file():
        _check_resume(yaml.safe_load(path.read_text()), config)
    path.write_text(yaml.safe_dump(stored(config), sort_keys=False))


def _check_resume(old: dict[str, Any], new: AnyConfig) -> None:
    before, after = _flat(old), _flat(stored(new))
    for key in ("method", *sorted(before.keys() | after.keys())):
        if before.get(key) != after.get(key) and key not in CHANGEABLE:
            raise ConfigError(
                f"{new.run_dir} holds a run with {key}={json.dumps(before.get(key))}, "
                f"not {json.dumps(after.get(key))}: give another name, or restore the value to resume it"
            )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
