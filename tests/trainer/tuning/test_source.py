"""From a configuration to items, over a real store and the tiny model's renderer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from proxy_stub import make_run, play_groups
from tuning_setup import KINDS

from agentrl.configs.config_files import validated
from agentrl.configs.tuning_config import AnyConfig
from agentrl.errors import StoreError, UserError
from agentrl.models import resolve_model
from agentrl.store import Database
from agentrl.trainer.distributed import World
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning.source import load_data
from agentrl.trainer.tuning.tuning_loop import tune

TINY = resolve_model("tiny")


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the run `test`: five groups of three two-turn sessions, whose rewards are 0, 1 and 2."""
    monkeypatch.delenv("AGENTRL_DATABASE_URL", raising=False)
    (tmp_path / "test").mkdir()
    database = Database(f"sqlite:///{tmp_path}/test/agentrl.db")
    database.upgrade()
    play_groups(database, make_run(database, steps=1), 5)
    database.close()
    return tmp_path


def config(kind: str, runs_dir: Path, data: dict[str, Any], **more: Any) -> AnyConfig:
    return validated({"name": "tuned", "model": "tiny", "runs_dir": runs_dir, "data": data} | more, KINDS[kind])


def returns(items: list[Any]) -> list[list[float]]:
    return [[sample.tokens.episode_return for sample in item] for item in items]


def test_the_best_of_a_run(runs_dir: Path) -> None:
    best = load_data(config("sft", runs_dir, {"run": "test", "best_of_group": 1}), TINY)
    assert returns(best.train) == [[2.0]] * 5
    rewarded = load_data(config("sft", runs_dir, {"run": "test", "min_reward": 1.0, "held_out": 3}), TINY)
    assert (len(rewarded.train), len(rewarded.held_out)) == (7, 3)
    assert {value for item in returns(rewarded.train) for value in item} == {1.0, 2.0}


def test_the_same_data_have_the_same_digest(runs_dir: Path) -> None:
    asked = config("sft", runs_dir, {"run": "test", "held_out": 3})
    one, again = load_data(asked, TINY), load_data(asked, TINY)
    assert one.digest() == again.digest()
    other = load_data(config("sft", runs_dir, {"run": "test", "held_out": 2}), TINY)
    assert other.digest() != one.digest()


def test_dpo_learns_a_runs_rewards(runs_dir: Path, world: World) -> None:
    asked = config("dpo", runs_dir, {"run": "test"}, steps=12, trainer={"lr": 3e-4})
    data = load_data(asked, TINY)
    assert returns(data.train) == [[2.0, 0.0]] * 5
    assert tune(asked, TINY, data, world, Stop())
    lines = [json.loads(line) for line in (runs_dir / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] == 1
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]


def test_long_items_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "abcd" * n, "completion": "x"} for n in (1, 2, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(config("sft", tmp_path, {"file": str(tmp_path / "rows.jsonl"), "max_tokens": 80}), TINY)
    assert len(data.train) == 2
    assert data.notes == ["left out 1 items of more than 80 tokens"]


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": answer} for answer in "bcd"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(config("dpo", tmp_path, {"file": str(tmp_path / "rows.jsonl")}), TINY)
    assert len(data.train) == 2
    assert data.notes == ["left out 1 pairs of two equal answers"]


def test_tokens_of_another_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 999_999], "loss_mask": [False, True]}))
    with pytest.raises(UserError, match="data: token id 999999 is not in the model's"):
        load_data(config("sft", tmp_path, {"file": str(tmp_path / "rows.jsonl")}), TINY)


def test_filters_that_select_nothing_are_refused(runs_dir: Path) -> None:
    with pytest.raises(UserError, match="data: 0 items, of which held_out takes 0: none are left to train"):
        load_data(config("sft", runs_dir, {"run": "test", "min_reward": 9.0}), TINY)


def test_a_missing_database_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/empty.db"
    with pytest.raises(StoreError, match=r"empty\.db does not exist"):
        load_data(config("sft", tmp_path, {"run": "test", "database_url": url}), TINY)
