"""The facts of trained tokens: equal to an independent computation, stored for the steps and trajectories asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_setup import Setup
from plain import load_plain, padded_logprobs
from poison import POISONED, poisoned
from ranks import run_ranks
from support import AGES, masked_samples, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import FACTS, Batch, TokenFacts
from agentrl.store.training import steps, token_facts
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.fact_collector import FactCollector
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy


@pytest.fixture
def s(tmp_path: Path, tiny_model: Path, world: World) -> Iterator[Setup]:
    setup = Setup(tmp_path, tiny_model, world)
    with setup.proxy:
        yield setup
    setup.database.close()


def stored(s: Setup, step: int) -> tuple[Batch, dict[str, TokenFacts]]:
    """The step's batch, and what is kept of it."""
    step_id = s.database.query(steps.of_run, s.run_id, step - 1)[0].id
    batch = s.database.query(steps.batch, step_id)
    names = {t.trajectory_id: step_id for t in batch.trajectories}
    return batch, s.database.query(token_facts.of_trajectories, names)


def named(facts: TokenFacts) -> Mapping[str, Any]:
    return dict(zip(FACTS, facts.trained, strict=True))


def test_stored_logprobs_and_entropies_are_those_of_an_independent_forward_pass(s: Setup, tiny_model: Path) -> None:
    assert s.train()
    batch, kept = stored(s, 1)
    assert kept.keys() == {t.trajectory_id for t in batch.trajectories}
    with torch.no_grad():
        logprobs, entropies = padded_logprobs(load_plain(tiny_model, torch.float32), batch.trajectories)
    for i, t in enumerate(batch.trajectories):
        facts = named(kept[t.trajectory_id])
        where = np.flatnonzero(t.loss_mask) - 1
        np.testing.assert_allclose(facts["logprob"], logprobs[i, where].numpy(), atol=1e-5, rtol=0)
        np.testing.assert_allclose(facts["entropy"], entropies[i, where].numpy(), atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(facts["proximal_logprob"], facts["logprob"])
        np.testing.assert_array_equal(facts["ratio"], 1.0)
        np.testing.assert_array_equal(facts["clipped"], 0.0)
        np.testing.assert_array_equal(facts["kept"], 1.0)
        quotient = np.exp(facts["proximal_logprob"] - t.logprobs[t.loss_mask])
        cap = s.config.trainer.algorithm.correction_cap
        np.testing.assert_allclose(facts["weight"], np.minimum(quotient, cap), rtol=1e-5)
        np.testing.assert_array_equal(facts["capped"], quotient > cap)


def test_the_mean_advantage_of_a_trajectory_is_the_one_of_its_step(s: Setup) -> None:
    assert s.train()
    _, kept = stored(s, 2)
    rows = dict(s.query("SELECT trajectory_id, advantage FROM step_trajectories"))
    for name, facts in kept.items():
        assert named(facts)["advantage"].mean() == pytest.approx(rows[name], abs=1e-6)


def test_only_the_steps_and_trajectories_asked_for_are_kept(s: Setup) -> None:
    wanted = s.config.trainer.token_facts.model_copy(update={"every": 2, "sample": 4})
    assert s.train(token_facts=wanted)
    assert [len(stored(s, step)[1]) for step in (1, 2, 3)] == [0, 4, 0]


def test_nothing_is_kept_when_it_is_switched_off(s: Setup) -> None:
    assert s.train(token_facts=s.config.trainer.token_facts.model_copy(update={"every": 0}))
    assert s.query("SELECT count(*) FROM token_facts") == [(0,)]


def collected(model: Path, world: World, *, loss: Any = None, **settings: Any) -> dict[str, TokenFacts]:
    """The facts of an update of random samples."""
    config = TrainerConfig(**settings)
    policy = load_sharded(Policy, model, world.mesh)
    samples = masked_samples()
    names = {sample.tokens.trajectory_id for sample in samples}
    facts = FactCollector(names, config.algorithm, own_loss=loss is not None)
    update_policy(policy, make_optimizer(policy, config), samples, 1, AGES, config, world, loss=loss, token_facts=facts)
    return facts.gathered(world)


def test_facts_do_not_depend_on_how_the_batch_is_cut(tiny_model: Path, world: World) -> None:
    settings = {"algorithm": {"preset": "gspo"}, "minibatches": 2}
    whole = collected(tiny_model, world, tokens_per_microbatch=100_000, **settings)
    cut = collected(tiny_model, world, tokens_per_microbatch=16, **settings)
    assert whole.keys() == cut.keys() == {s.tokens.trajectory_id for s in random_samples()}
    for name, facts in whole.items():
        np.testing.assert_allclose(cut[name].trained, facts.trained, atol=1e-4)
        np.testing.assert_allclose(cut[name].masked, facts.masked, atol=1e-4)


@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2)])
def test_two_ranks_know_what_one_does(
    tiny_model: Path, tmp_path: Path, world: World, tensor: int, context: int
) -> None:
    run_ranks("rank_facts.py", 2, tiny_model, tmp_path, tensor, context)
    alone = collected(tiny_model, world, minibatches=2, lr=1e-3)
    for rank in range(2):
        together = np.load(tmp_path / f"rank-{rank}.npz")
        assert set(together) == {f"{name} {part}" for name in alone for part in ("trained", "masked")}
        for name, facts in alone.items():
            np.testing.assert_allclose(together[f"{name} trained"], facts.trained, atol=5e-4)
            np.testing.assert_allclose(together[f"{name} masked"], facts.masked, atol=5e-4)


def test_a_minibatch_that_is_skipped_has_no_facts(tiny_model: Path, world: World) -> None:
    config = TrainerConfig(minibatches=1)
    policy, samples = load_sharded(Policy, tiny_model, world.mesh), poisoned(random_samples(), POISONED)
    facts = FactCollector({sample.tokens.trajectory_id for sample in samples}, config.algorithm)
    found: list[NonFinite] = []
    optimizer = make_optimizer(policy, config)
    update_policy(policy, optimizer, samples, 1, AGES, config, world, None, found.append, token_facts=facts)
    assert len(found) == 1
    assert facts.gathered(world) == {}


def test_the_second_minibatch_has_ratios_against_the_policy_before_the_step(tiny_model: Path, world: World) -> None:
    facts = collected(tiny_model, world, minibatches=2, lr=1e-3)
    every = {name: np.concatenate([named(one)[name] for one in facts.values()]) for name in FACTS}
    np.testing.assert_allclose(every["ratio"], np.exp(every["logprob"] - every["proximal_logprob"]), rtol=1e-4)
    assert 0 < (every["ratio"] != 1).mean() < 1


def test_a_loss_of_the_user_has_no_ratio_of_ours(tiny_model: Path, world: World) -> None:
    facts = collected(tiny_model, world, loss=lambda tokens, *_: -tokens.advantages_S * tokens.logprobs_S)
    for one in facts.values():
        found = named(one)
        assert np.isnan([found[name] for name in ("ratio", "clipped", "weight", "capped")]).all()
        assert np.isfinite([found[name] for name in ("logprob", "entropy", "advantage")]).all()
