"""NaN and infinity: nothing learns from them, and who brought them is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_setup import Setup, same
from poison import POISONED, poison_store, poisoned, repair_store
from ranks import run_ranks
from safetensors.torch import load_file
from support import AGES, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import NonFiniteError
from agentrl.store import events
from agentrl.store.training import steps
from agentrl.trainer.distributed import World
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Sample
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy


class Learning:
    """A policy, perhaps with a critic, that has made one good update."""

    def __init__(self, model: Path, world: World, **settings: Any) -> None:
        self.config, self.world = TrainerConfig(**{"lr": 1e-3} | settings), world
        self.models: Models = make_models(model, self.config, world)
        self.optimizer = make_optimizer(self.models.policy, self.config)
        self.found: list[NonFinite] = []
        self.update(self.samples(0))
        assert not self.found

    def samples(self, seed: int) -> list[Sample]:
        trajectories = [s.tokens for s in random_samples(seed)]
        made = make_samples(trajectories, self.config.algorithm, self.models, 4096, self.world)
        return [  # of `random_samples`, all returns of a group are the same to group baselines
            dataclasses.replace(m, advantages=s.advantages)
            for m, s in zip(made.samples, random_samples(seed), strict=True)
        ]

    def update(self, samples: list[Sample]) -> dict[str, float]:
        return update_policy(
            self.models.policy,
            self.optimizer,
            samples,
            1,
            AGES,
            self.config,
            self.world,
            self.models.critic,
            self.found.append,
        )

    def state(self) -> list[torch.Tensor]:
        """All weights, and all that optimizers remember."""
        learners: list[Any] = [(self.models.policy, self.optimizer)]
        if self.models.critic:
            learners.append((self.models.critic.critic, self.models.critic.optimizer))
        return [
            tensor.detach().clone()
            for model, optimizer in learners
            for _, p in model.trainable()
            for tensor in (p, *(optimizer.state[p][k] for k in ("step", "exp_avg", "exp_avg_sq")))
        ]


def bit_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "gspo"])
def test_a_skipped_minibatch_changes_no_weight(tiny_model: Path, world: World, algorithm: str, value: float) -> None:
    learning = Learning(tiny_model, world, algorithm=algorithm)
    before = learning.state()
    metrics = learning.update(poisoned(learning.samples(1), POISONED, value))
    assert [f.trajectories for f in learning.found] == [(POISONED,)]
    assert "minibatch 1 of 1" in str(learning.found[0])
    assert metrics["nonfinite_minibatches"] == 1
    assert metrics["tokens_trained"] == 0
    assert bit_equal(learning.state(), before)
    assert learning.update(learning.samples(1))["nonfinite_minibatches"] == 0
    assert not bit_equal(learning.state(), before)


def test_the_other_minibatches_are_trained(tiny_model: Path, world: World) -> None:
    learning = Learning(tiny_model, world, minibatches=3)
    stepped: list[None] = []
    learning.optimizer.register_step_post_hook(lambda *_: stepped.append(None))
    metrics = learning.update(poisoned(learning.samples(1), POISONED))
    assert len(stepped) == 2
    assert [f.trajectories for f in learning.found] == [(POISONED,)]
    assert all(np.isfinite(list(metrics.values())))
    whole = sum(int(s.tokens.loss_mask.sum()) for s in learning.samples(1))
    lost = sum(int(s.tokens.loss_mask.sum()) for s in learning.samples(1) if s.tokens.group_id == "g1")
    assert metrics["tokens_trained"] == whole - lost > 0


def test_a_group_without_advantage_is_checked_too(tiny_model: Path, world: World) -> None:
    learning = Learning(tiny_model, world)
    samples = [
        dataclasses.replace(s, advantages=np.zeros_like(s.advantages)) if s.tokens.group_id == "g1" else s
        for s in learning.samples(1)
    ]
    before = learning.state()
    metrics = learning.update(poisoned(samples, POISONED))
    assert [(f.where, f.trajectories) for f in learning.found] == [("groups without advantage", (POISONED,))]
    assert metrics["nonfinite_minibatches"] == 1
    assert np.isfinite(metrics["loss"])
    assert not bit_equal(learning.state(), before)  # the others are sound


def test_a_nonfinite_value_loss_stops_policy_and_critic(tiny_model: Path, world: World) -> None:
    learning = Learning(tiny_model, world, algorithm="ppo")
    before = learning.state()
    samples = learning.samples(1)
    targets = next(s.targets for s in samples if s.tokens.trajectory_id == POISONED)
    assert targets is not None
    targets[:] = np.nan
    learning.update(samples)
    assert [f.trajectories for f in learning.found] == [(POISONED,)]
    assert bit_equal(learning.state(), before)


def test_nonfinite_weights_blame_every_trajectory(tiny_model: Path, world: World) -> None:
    learning = Learning(tiny_model, world)
    with torch.no_grad():
        next(p for _, p in learning.models.policy.trainable()).fill_(np.nan)
    learning.update(learning.samples(1))
    assert len(learning.found[0].trajectories) == 12
    assert str(learning.found[0]).endswith("g1-t0 and 7 more")


def test_an_update_stops_unless_told_otherwise(tiny_model: Path, world: World) -> None:
    learning = Learning(tiny_model, world)
    before = learning.state()
    bad, policy = poisoned(learning.samples(1), POISONED), learning.models.policy
    with pytest.raises(NonFiniteError, match=f"loss nan.*grad_norm nan.*{POISONED}"):
        update_policy(policy, learning.optimizer, bad, 1, AGES, learning.config, world)
    assert bit_equal(learning.state(), before)


def test_ranks_agree_on_what_is_not_finite(tiny_model: Path, tmp_path: Path) -> None:
    run_ranks("rank_nonfinite.py", 2, tiny_model, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["named"] == [[POISONED]]
    assert (first["skipped"], first["same"]) == (1, True)
    assert POISONED in first["stopped"]


def of_step_two(setup: Setup) -> str:
    """A trajectory that the second step will train."""
    groups = [row[0] for row in setup.query("SELECT id FROM groups ORDER BY id")]
    return setup.query(f"SELECT id FROM trajectories WHERE group_id = '{groups[2]}' ORDER BY id")[0][0]


def events_of(setup: Setup) -> list[dict[str, Any]]:
    return [event.data for event in setup.database.query(events.of_run, setup.run_id, "nonfinite")]


def test_a_run_stops_and_continues_after_its_data_are_repaired(
    setup: Setup, tiny_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    undisturbed = Setup(tmp_path_factory.mktemp("undisturbed"), tiny_model, world)
    with undisturbed.proxy:
        assert undisturbed.train()
    undisturbed.database.close()

    trajectory_id = of_step_two(setup)
    before = poison_store(setup.database, trajectory_id)
    with pytest.raises(NonFiniteError, match=f"step 2: .*{trajectory_id}"):
        setup.train()
    assert [(s, state) for s, state, _, _ in setup.steps()] == [(1, "published"), (2, "started")]
    (event,) = events_of(setup)
    assert (event["step"], event["does"], event["trajectories"]) == (2, "stop", [trajectory_id])

    repair_store(setup.database, before)
    assert setup.train()
    assert [(s, state) for s, state, _, _ in setup.steps()] == [(1, "published"), (2, "published"), (3, "published")]
    assert same(load_file(undisturbed.config.run_dir / "model" / "model.safetensors"), setup.config.run_dir / "model")


def test_a_run_that_skips_continues_and_says_so(setup: Setup, capsys: Any) -> None:
    trajectory_id = of_step_two(setup)
    poison_store(setup.database, trajectory_id)
    assert setup.train(nonfinite="skip")
    metrics = [row.metrics for row in setup.database.query(steps.of_run, setup.run_id)]
    assert [m["nonfinite_minibatches"] for m in metrics] == [0, 1, 0]
    (event,) = events_of(setup)
    assert (event["step"], event["does"], event["trajectories"]) == (2, "skip", [trajectory_id])
    assert f"trajectories: {trajectory_id}: skipped" in capsys.readouterr().out
    first, second = (load_file(next(setup.config.run_dir.glob(f"weights/v{n}-*/model.safetensors"))) for n in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
