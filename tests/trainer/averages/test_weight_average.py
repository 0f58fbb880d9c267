"""The running average of weights against its definition, over steps, ranks and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loop_setup import Setup, die_before
from ranks import run_ranks
from torch import nn

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import AverageConfig
from agentrl.trainer.averages.weight_average import COUNT, PART, WeightAverage, newest_weight
from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.checkpoints.checkpoint_tensors import CheckpointTensors
from agentrl.trainer.training_run import TrainingRun


class OneTensor:
    """A model of one parameter."""

    def __init__(self, values: list[float]) -> None:
        self.p = nn.Parameter(torch.tensor(values))

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [("p", self.p)]


def defined(history: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Σ d^(t−i) θ_i / Σ d^(t−i), in float64."""
    shares = [decay**age for age in reversed(range(len(history)))]
    weighted = [share * one.double() for share, one in zip(shares, history, strict=True)]
    return torch.stack(weighted).sum(0) / sum(shares)


@given(
    st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=1, max_size=40),
    st.floats(0.01, 0.9999),
)
def test_the_average_is_the_weighted_mean_of_all_steps(values: list[list[float]], decay: float) -> None:
    model = OneTensor([100.0, 100.0, 100.0])  # the base weights are no part of it
    average = WeightAverage(model, decay)
    for row in values:
        with torch.no_grad():
            model.p.copy_(torch.tensor(row))
        average.add(model)
    expected = defined([torch.tensor(row) for row in values], decay)
    torch.testing.assert_close(average.tensors["p"].double(), expected, rtol=1e-5, atol=1e-5)
    assert int(average.steps) == len(values)


@given(st.floats(0.001, 0.99999), st.integers(1, 10_000))
def test_the_newest_weight_is_that_of_adams_corrected_moments(decay: float, steps: int) -> None:
    assert newest_weight(decay, 1) == pytest.approx(1.0)
    weight = newest_weight(decay, steps)
    assert 1.0 - decay - 1e-12 <= weight <= 1.0 + 1e-12
    assert weight * (1.0 - decay**steps) == pytest.approx(1.0 - decay, rel=1e-6)


def history_of(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The weights after each step from now on."""
    found: list[dict[str, torch.Tensor]] = []
    real = TrainingRun.save

    def save(run: TrainingRun) -> None:
        found.append({name: p.detach().clone() for name, p in run._t.policy.trainable()})
        real(run)

    monkeypatch.setattr(TrainingRun, "save", save)
    return found


def test_a_resumed_run_goes_on_with_the_average(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    average = AverageConfig(decay=0.5)
    die_before(monkeypatch, setup, 3, average=average)
    history = history_of(setup, monkeypatch)
    assert setup.train(average=average)
    newest = checkpoint_folders.folders(setup.config.run_dir / "checkpoints")[-1]
    assert int(CheckpointTensors(newest, COUNT).read("steps")) == 3
    found = CheckpointTensors(newest, PART)
    assert found.names == history[0].keys()
    before = checkpoint_folders.folders(setup.config.run_dir / "checkpoints")[-2]
    known = CheckpointTensors(before, PART)
    weight = newest_weight(0.5, 3)
    for name, newest_tensor in history[-1].items():
        assert torch.equal(found.read(name), known.read(name).lerp(newest_tensor, weight))
        assert not torch.equal(found.read(name), newest_tensor)


def test_steps_that_leave_the_policy_as_it_is_are_no_part_of_the_average(setup: Setup) -> None:
    assert setup.train(
        algorithm=Algorithm(preset="ppo", kl_coef=0.5, kl_target=0.1), critic_warmup_steps=2, average=AverageConfig()
    )
    newest = checkpoint_folders.folders(setup.config.run_dir / "checkpoints")[-1]
    assert int(CheckpointTensors(newest, COUNT).read("steps")) == 1
    metrics = [json.loads(found) for (found,) in setup.query("SELECT metrics FROM steps ORDER BY step")]
    assert [found["kl_coef"] for found in metrics] == [0.5] * 3  # controlled after the third


def test_without_the_setting_nothing_is_kept(setup: Setup) -> None:
    assert setup.train()
    newest = checkpoint_folders.folders(setup.config.run_dir / "checkpoints")[-1]
    assert CheckpointTensors(newest, PART).names == set()


def test_ranks_average_their_shards(tmp_path: Path, tiny_model: Path) -> None:
    for ranks in (1, 2):
        run_ranks("rank_average.py", ranks, tmp_path / str(ranks), tiny_model)
    facts = json.loads((tmp_path / "2" / "facts.json").read_text())
    assert facts["held"] < 0.7 * facts["whole"]  # a rank holds its shard only
    one, two = (
        CheckpointTensors(checkpoint_folders.folders(tmp_path / str(ranks) / "checkpoints")[-1], PART)
        for ranks in (1, 2)
    )
    assert one.names == two.names
    for name in one.names:
        assert torch.equal(one.read(name), two.read(name))
