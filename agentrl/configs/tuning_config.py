"""Configurations of `agentrl sft`, `dpo` and `reward-model`: keys that mean what they do in a run have its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, model_validator

from agentrl.configs.config_files import read_config, validated
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
"""Keys that may change when a run is resumed. What the data are is checked by their digest."""


class DataConfig(Section):
    """Where the data are from: a file, or the trajectories of a run. One of `file` and `run` must be given."""

    file: Path | None = None
    """JSONL or Parquet, one item a row."""
    run: str | None = None
    """Name or folder of a run: its recorded token ids, as they were sampled."""
    database_url: str | None = None
    """Where that run is; null takes AGENTRL_DATABASE_URL, else that of the run's folder."""
    states: Annotated[tuple[State, ...], Field(min_length=1)] = ("ready", "leased", "trained", "stale")
    """Only the run's trajectories in these states."""
    min_version: NonNegative | None = None
    """Only trajectories without a trained token of an older weight version."""
    max_version: NonNegative | None = None
    """Only trajectories without a trained token of a newer weight version."""
    min_reward: float | None = None
    """Only trajectories of episodes with at least this return; of a pair, the chosen one."""
    max_tokens: Positive | None = None
    """Longer items are left out, never cut; null takes the model's context."""
    held_out: NonNegative = 0
    """As many items are never trained but scored: before the first step and with every checkpoint."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.file is None) == (self.run is None):
            raise ValueError("give either file or run")
        if self.file is not None:
            for key in type(self).model_fields.keys() - {"file", "run", "max_tokens", "held_out"}:
                if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                    raise ValueError(f"{key} chooses among a run's trajectories, not in a file")
        return self


class SftDataConfig(DataConfig):
    """Where the conversations are from: a file, or the trajectories of a run."""

    best_of_group: Positive | None = None
    """Only the N best episodes of each group; of equal ones the first. null: all."""


class PairDataConfig(DataConfig):
    """Where the pairs are from: a file, or the trajectories of a run, paired in their groups by reward."""

    pairs_per_group: Positive = 1
    """At most as many pairs of one group: the best with the worst, the second best with the second worst, …"""
    min_margin: Annotated[float, Field(ge=0)] = 0.0
    """Pairs whose returns differ by less are left out; equal ones always are."""


class TuningTrainerConfig(UpdateConfig):
    """The updates."""

    batch_size: Positive = 32
    """Items (conversations, trajectories, pairs) of one optimizer step."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """AdamW learning rate, at its highest."""
    checkpoint_every: Positive = 50
    """Steps between durable checkpoints; the last step, and one that was told to stop, always leave one."""


class TuningConfig(Section):
    """What all three methods share."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Folder under `runs_dir`."""
    model: str
    """`smollm2`, `tiny`, or a local Hugging Face folder."""
    epochs: Positive = 1
    """Passes over the data."""
    steps: Positive | None = None
    """Optimizer steps; null: as many as the epochs have."""
    seed: int = 0
    """Seeds the order of the items, what is held out, and a new head or adapter."""
    runs_dir: Path = Path("runs")
    """Where run folders live."""
    trainer: TuningTrainerConfig = TuningTrainerConfig()

    @property
    def run_dir(self) -> Path:
        """`runs_dir/name`."""
        return self.runs_dir / self.name


class SftConfig(TuningConfig):
    """`agentrl sft`: imitate the assistant's turns of conversations."""

    method: Literal["sft"] = "sft"
    """Which command this file is for."""
    data: SftDataConfig


class PairConfig(TuningConfig):
    """What the two methods that learn from pairs share."""

    data: PairDataConfig


class DpoConfig(PairConfig):
    """`agentrl dpo`: prefer the chosen of two answers to the rejected one."""

    method: Literal["dpo"] = "dpo"
    """Which command this file is for."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid`: −log σ(βh); `ipo`: (h − 1/(2β))², h per token."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """β: how strongly the base model holds the policy back."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are taken to be the wrong way round (`sigmoid`)."""

    @model_validator(mode="after")
    def _smoothing_has_a_meaning(self) -> Self:
        if self.loss_type == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing goes with loss_type sigmoid")
        return self


class RewardModelConfig(PairConfig):
    """`agentrl reward-model`: a number for a conversation, larger for the chosen of two."""

    method: Literal["reward-model"] = "reward-model"
    """Which command this file is for."""


Kind = TypeVar("Kind", SftConfig, DpoConfig, RewardModelConfig)
AnyConfig = SftConfig | DpoConfig | RewardModelConfig


def load(path: Path, overrides: list[str] | None, kind: type[Kind]) -> Kind:
    """Read YAML, apply `section.key=value` overrides, validate. Raises ConfigError, one line, naming the field."""
    return validated(read_config(path, overrides), kind)


def stored(config: AnyConfig) -> dict[str, Any]:
    """Every field, as it is kept in the run's folder: without a database's password."""
    data = config.model_dump(mode="json")
    if data["data"]["database_url"] is not None:
        data["data"]["database_url"] = without_password(data["data"]["database_url"])
    return data


def keep(config: AnyConfig) -> None:
    """Write `config.yaml` into the run's folder. Raises ConfigError when one there says to compute something else."""
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
