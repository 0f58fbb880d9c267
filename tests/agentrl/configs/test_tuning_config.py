"""Configurations of SFT, DPO and reward models: strict, documented, one-line errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agentrl.configs.tuning_config import DpoConfig, RewardModelConfig, SftConfig, TuningConfig, keep, load
from agentrl.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "tuning.md"
BASE: dict[str, Any] = {"name": "r", "model": "tiny", "data": {"file": "x.jsonl"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tune.yaml"
    file.write_text(yaml.safe_dump(BASE | {"runs_dir": str(tmp_path / "runs")}))
    return file


def test_overrides_are_yaml(path: Path) -> None:
    config = load(path, ["trainer.lr=2e-4", "beta=0.5", "data.held_out=8"], DpoConfig)
    assert (config.trainer.lr, config.beta, config.data.held_out) == (2e-4, 0.5, 8)


@pytest.mark.parametrize(
    ("kind", "overrides", "message"),
    [
        (SftConfig, ["bta=1"], "unknown config key 'bta'"),
        (SftConfig, ["trainer.batchsize=1"], "unknown config key 'trainer.batchsize'; did you mean 'batch_size'?"),
        (SftConfig, ["data.best_of=1"], "unknown config key 'data.best_of'; did you mean 'best_of_group'?"),
        (SftConfig, ["data.pairs_per_group=2"], "unknown config key 'data.pairs_per_group'"),
        (SftConfig, ["data.run=demo"], "config key 'data': Value error, give either file or run"),
        (SftConfig, ["data.file=null"], "config key 'data': Value error, give either file or run"),
        (SftConfig, ["data.min_reward=1"], "min_reward applies to a run's trajectories, not to a file"),
        (SftConfig, ["data.file=null", "data.run=r", "data.states=[traned]"], "no 'traned'; did you mean 'trained'"),
        (SftConfig, ["method=dpo"], "config key 'method': there is no 'dpo'"),
        (SftConfig, ["trainer.lr=0"], "config key 'trainer.lr': Input should be greater than 0"),
        (DpoConfig, ["loss_type=sigmod"], "config key 'loss_type': there is no 'sigmod'; did you mean 'sigmoid'?"),
        (DpoConfig, ["loss_type=ipo", "label_smoothing=0.1"], "label_smoothing needs loss_type: sigmoid"),
        (DpoConfig, ["label_smoothing=0.5"], "config key 'label_smoothing': Input should be less than 0.5"),
        (RewardModelConfig, ["beta=1"], "unknown config key 'beta'"),
    ],
)
def test_a_bad_key_is_named_in_one_line(path: Path, kind: type[Any], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, kind)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_may_be_resumed_but_not_into_another(path: Path) -> None:
    config = load(path, [], SftConfig)
    config.run_dir.mkdir(parents=True)
    keep(config)
    keep(load(path, ["steps=9", "resources.trainer.ranks=2", "data.file=elsewhere.jsonl"], SftConfig))
    with pytest.raises(ConfigError, match=r"holds a run with trainer.lr=1e-05, not 0.5: give another name"):
        keep(load(path, ["trainer.lr=0.5"], SftConfig))
    with pytest.raises(ConfigError, match='holds a run with method="sft", not "dpo"'):
        keep(load(path, [], DpoConfig))


def test_a_databases_password_is_not_kept(path: Path) -> None:
    url = "postgresql://me:secret@host/db"
    config = load(path, ["data.file=null", "data.run=r", f"data.database_url={url}"], SftConfig)
    config.run_dir.mkdir(parents=True)
    keep(config)
    assert "secret" not in (config.run_dir / "config.yaml").read_text()
    keep(config)


def test_the_folder_of_another_kind_of_run_is_refused(path: Path) -> None:
    config = load(path, [], SftConfig)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text("name: r\nmodel: tiny\ntrainer: {lr: 1.0}\n")
    with pytest.raises(ConfigError, match="holds a run with method=null"):
        keep(config)


def keys(kind: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key with its default as it is documented."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys(field.annotation, f"{prefix}{name}.")
        elif (default := field.get_default(call_default_factory=True)) is PydanticUndefined:
            yield f"{prefix}{name}", "required"
        else:
            yield f"{prefix}{name}", f"`{json.dumps(default, default=str)}`"


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig, RewardModelConfig])
def test_every_key_is_documented_with_its_default(kind: type[TuningConfig]) -> None:
    text = PAGE.read_text()
    for key, default in keys(kind):
        if key != "method":
            assert f"| `{key}` | {default} |" in text
