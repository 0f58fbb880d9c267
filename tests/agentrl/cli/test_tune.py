"""`agentrl sft`, `dpo` and `reward-model` as processes: one rank and two, Ctrl-C, mistakes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from forks import Command
from history import History
from safetensors.torch import load_file

from agentrl.cli.main import main
from agentrl.models import resolve_model
from agentrl.store import Database

CONVERSATIONS = [
    {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}
    for word in ("abcd", "efgh", "hgab", "cafe", "dada", "beef")
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """An SFT of the tiny model on six conversations."""
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in CONVERSATIONS))
    path = tmp_path / "tune.yaml"
    trainer = {"batch_size": 2, "lr": 1e-4, "threads": 1}
    made = {"name": "r", "model": str(resolve_model("tiny")), "runs_dir": str(tmp_path / "runs"), "steps": 3}
    path.write_text(yaml.safe_dump(made | {"data": {"file": str(file)}, "trainer": trainer}))
    return path


def start(*args: object) -> Command:
    env = {name: value for name, value in os.environ.items() if name != "AGENTRL_DATABASE_URL"}
    return Command([*map(str, args)], env)


@pytest.mark.long
def test_two_ranks_imitate_a_file(config: Path, tmp_path: Path) -> None:
    process = start("sft", config, "resources.trainer.ranks=2", "data.held_out=1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.startswith("5 training items, 1 held out\n")
    assert "step 3/3" in out
    assert load_file(tmp_path / "runs" / "r" / "model" / "model.safetensors")


def test_ctrl_c_finishes_the_step_and_the_same_command_goes_on(config: Path, tmp_path: Path) -> None:
    process = start("sft", config, "steps=100000")
    for line in process.stdout:
        if line.startswith("step 1/"):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "of 100000: the same command continues" in out.splitlines()[-1]
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs" / "r" / "metrics.jsonl").read_text().splitlines()]
    process = start("sft", config, f"steps={steps[-1] + 1}")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert f"resuming after step {steps[-1]}" in out


def test_the_best_of_a_run_of_the_store(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "test"
    folder.mkdir(parents=True)
    database = Database(f"sqlite:///{folder}/agentrl.db")
    database.upgrade()
    History(database, seed=3).train(2)
    database.close()
    process = start("sft", config, "data={run: test, best_of_group: 1}", "steps=1")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "step 1/1" in out


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data.file=none.jsonl"], "agentrl: data.file: none.jsonl does not exist"),
        (["data.held_out=6"], "agentrl: data: 6 items, of which held_out takes 6: none are left to train"),
        (["data.max_tokens=10"], "(left out 6 items of more than 10 tokens)"),
        (["model=tinny"], "agentrl: no model 'tinny'; did you mean 'tiny'?"),
        (["data.held_out=6", "resources.trainer.ranks=2"], "agentrl: data: 6 items, of which held_out takes 6"),
    ],
)
def test_mistakes_are_one_line(
    config: Path, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agentrl", "sft", str(config), *overrides])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1
