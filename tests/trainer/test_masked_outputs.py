"""Sampled tokens out of the loss: measured as an independent computation does, without a change of the update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_setup import Setup
from plain import load_plain, padded_logprobs
from support import AGES, masked_samples, save_tiny_model

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import FACTS, GREEDY_BELOW, MASKED_FACTS, TokenFacts, TrajectoryTokens
from agentrl.store.training import steps, token_facts
from agentrl.trainer.distributed import World
from agentrl.trainer.masked_outputs import distinct_predictions
from agentrl.trainer.metrics.fact_collector import FactCollector
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy


@pytest.fixture
def s(tmp_path: Path, tiny_model: Path, world: World) -> Iterator[Setup]:
    setup = Setup(tmp_path, tiny_model, world, steps=1)
    with setup.proxy:
        yield setup
    setup.database.close()


def check(model: Path, kept: dict[str, TokenFacts], trajectories: list[TrajectoryTokens]) -> int:
    """Compare facts with transformers' padded forward in float32; returns how many tokens are masked outputs."""
    at_one = [replace(t, temperatures=np.where(t.temperatures < GREEDY_BELOW, 1, t.temperatures)) for t in trajectories]
    with torch.no_grad():
        logprobs, entropies = padded_logprobs(load_plain(model, torch.float32), at_one)
    for i, t in enumerate(trajectories):
        facts = kept[t.trajectory_id]
        for mask, table, names in (
            (t.loss_mask, facts.trained, FACTS),
            (t.masked_outputs, facts.masked, MASKED_FACTS),
        ):
            where = np.flatnonzero(mask) - 1
            found = dict(zip(names, table, strict=True))
            np.testing.assert_allclose(found["logprob"], logprobs[i, where].numpy(), atol=1e-5, rtol=0)
            np.testing.assert_allclose(found["entropy"], entropies[i, where].numpy(), atol=1e-5, rtol=1e-5)
    return sum(int(t.masked_outputs.sum()) for t in trajectories)


def updated(
    model: Path, world: World, *, measure: bool, unpacked: str = "", **settings: Any
) -> tuple[Policy, dict[str, TokenFacts], Any]:
    """The policy after an update of samples with masked outputs, their facts, and the metrics."""
    config, samples = TrainerConfig(lr=1e-3, **settings), masked_samples()
    policy = load_sharded(Policy, model, world.mesh)
    policy.read(unpacked)
    names = {sample.tokens.trajectory_id for sample in samples}
    facts = FactCollector(names if measure else set(), config.algorithm)
    optimizer = make_optimizer(policy, config)
    metrics = update_policy(policy, optimizer, samples, 1, AGES, config, world, token_facts=facts)
    return policy, facts.gathered(world), metrics


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_masked_outputs_have_the_logprobs_of_an_independent_forward_pass(
    tmp_path: Path, world: World, tied: bool, entropy_coef: float
) -> None:
    model = save_tiny_model(tmp_path, tied=tied)
    _, kept, _ = updated(model, world, measure=True, algorithm={"entropy_coef": entropy_coef})
    assert check(model, kept, [sample.tokens for sample in masked_samples()]) > 20


def test_a_model_that_cannot_be_packed_measures_the_same(tiny_model: Path, world: World) -> None:
    _, kept, _ = updated(tiny_model, world, measure=True, unpacked="for this test")
    assert check(tiny_model, kept, [sample.tokens for sample in masked_samples()]) > 20


@pytest.mark.parametrize("settings", [{}, {"minibatches": 2}, {"tokens_per_microbatch": 16}, {"train_layers": 1}])
def test_measuring_changes_no_weight(tiny_model: Path, world: World, settings: Any) -> None:
    (measured, kept, theirs), (plain, none, ours) = (
        updated(tiny_model, world, measure=on, **settings) for on in (True, False)
    )
    assert any(one.masked.size for one in kept.values())
    assert none == {}
    for (name, a), (_, b) in zip(measured.trainable(), plain.trainable(), strict=True):
        assert torch.equal(a, b), name
    assert {n: v for n, v in theirs.items() if n != "flops"} == {n: v for n, v in ours.items() if n != "flops"}
    assert theirs["flops"] > ours["flops"]


def test_a_run_keeps_them_for_calls_that_do_not_train(s: Setup, tiny_model: Path) -> None:
    with s.database.write() as conn:
        of_first = "SELECT id FROM interactions WHERE parent_id IS NULL"
        conn.exec_driver_sql(f"UPDATE interactions SET trainable = false, temperature = 0 WHERE id IN ({of_first})")
    assert s.train()
    step_id = s.database.query(steps.of_run, s.run_id, 0)[0].id
    batch = s.database.query(steps.batch, step_id)
    names = {t.trajectory_id: step_id for t in batch.trajectories}
    kept = s.database.query(token_facts.of_trajectories, names)
    assert kept.keys() == names.keys()
    assert check(tiny_model, kept, batch.trajectories) == 4 * len(names)  # the four tokens of each first call


def test_a_trajectorys_masked_outputs_end_with_its_last_loss_token() -> None:
    (t, *_) = (sample.tokens for sample in masked_samples())
    sampled = np.flatnonzero(t.turn_ids >= 0)
    for count in range(1, len(sampled) + 1):
        mask = np.zeros_like(t.loss_mask)
        mask[sampled[:count:2]] = True
        found = np.flatnonzero(replace(t, loss_mask=mask).masked_outputs)
        np.testing.assert_array_equal(found, sampled[1 : count - 1 : 2])


def test_a_prediction_that_a_loss_token_needs_is_computed_once() -> None:
    trained = np.array([[4.0, 1, 1], [2, 1, 1], [4, 1, 1]])
    masked = np.array([[3.0, 1, 1], [2, 1, 1], [1, 1, 1], [3, 1, 1]])
    keys, count, places = distinct_predictions(trained, masked)
    assert (count, len(keys)) == (2, 4)
    np.testing.assert_array_equal(keys[places], np.concatenate([trained, masked]))
    np.testing.assert_array_equal(keys[:count], np.unique(trained, axis=0))
