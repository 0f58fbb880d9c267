"""The reference policy: older weights that change places with the policy's, and the divergence from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import AGES, random_samples

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.errors import ModelFolderError
from agentrl.trainer.checkpoints import checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.reference import Reference
from agentrl.trainer.models.run_models import Models
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Microbatch, collate, make_units
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

TRAJECTORIES = [s.tokens for s in random_samples()]
TRAINED: dict[str, dict[str, Any]] = {
    "all": {},
    "top layer": {"train_layers": 1},
    "adapter": {"adapter": LoraConfig(rank=3, alpha=6)},
}
"""What of the policy is trained."""


def batch() -> Microbatch:
    return collate(make_units(random_samples(), 4096))


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    return policy(batch())[0]


def step(policy: Policy, world: World, **settings: Any) -> dict[str, float]:
    config = TrainerConfig(**{"lr": 1e-3} | settings)
    return update_policy(policy, make_optimizer(policy, config), random_samples(), 1, AGES, config, world)


@pytest.mark.parametrize("how", TRAINED)
def test_the_reference_is_the_initial_policy_and_does_not_change_the_policy(
    tiny_model: Path, world: World, how: str
) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh, **TRAINED[how])
    before, reference = logprobs(policy), Reference(policy)
    step(policy, world)
    moved = logprobs(policy)
    for _ in range(2):
        with reference.in_place():
            assert torch.equal(logprobs(policy), before)
        assert torch.equal(logprobs(policy), moved)
    assert not torch.equal(moved, before)
    reference.refresh()
    step(policy, world)
    with reference.in_place():
        assert torch.equal(logprobs(policy), moved)


def test_with_frozen_layers_the_reference_holds_only_trained_ones(tiny_model: Path, world: World) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh, train_layers=1)
    assert Reference(policy).tensors.keys() == {name for name, _ in policy.trainable()}


@pytest.mark.parametrize("how", TRAINED)
def test_a_reference_of_another_models_folder(tiny_model: Path, other_model: Path, world: World, how: str) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh, **TRAINED[how])
    before, reference = logprobs(policy), Reference(policy)
    reference.overlay(other_model, world)
    with reference.in_place():
        assert torch.equal(logprobs(policy), logprobs(load_sharded(Policy, other_model, world.mesh)))
    assert torch.equal(logprobs(policy), before)


def test_a_folder_with_some_tensors_overlays_the_base(
    tiny_model: Path, other_model: Path, world: World, tmp_path: Path
) -> None:
    name = "model.norm.weight"
    save_file({name: load_file(other_model / "model.safetensors")[name] * 2}, tmp_path / "model.safetensors")
    policy = load_sharded(Policy, tiny_model, world.mesh)
    reference = Reference(policy)
    reference.overlay(tmp_path, world)
    with reference.in_place():
        found = {n: full(p).clone() for n, p in policy.lm.named_parameters()}
    base = load_file(tiny_model / "model.safetensors")
    assert {n for n in base if not torch.equal(found[n], base[n])} == {name}


@pytest.mark.parametrize("how", TRAINED)
def test_the_reference_can_be_a_checkpoint(tiny_model: Path, world: World, tmp_path: Path, how: str) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh, **TRAINED[how])
    step(policy, world)
    parts = checkpoint_writer.state_of("policy", policy, make_optimizer(policy, TrainerConfig()))
    batch = TrainedBatch(step_id="s", digest="d", estimator="grpo", wasted_tokens=0, trained=[])
    record = StepRecord(step=1, version=1, batch=batch, metrics={})
    saved = checkpoint_writer.begin(tmp_path, record, parts, world, copied=False).finish()
    fresh = load_sharded(Policy, tiny_model, world.mesh, **TRAINED[how])
    reference = Reference(fresh)
    assert not torch.equal(logprobs(fresh), logprobs(policy))
    reference.overlay(saved.folder, world)
    with reference.in_place():
        assert torch.equal(logprobs(fresh), logprobs(policy))


def test_a_folder_that_does_not_fit_is_refused(tiny_model: Path, world: World, tmp_path: Path) -> None:
    reference = Reference(load_sharded(Policy, tiny_model, world.mesh))
    with pytest.raises(ModelFolderError, match="none of the model's tensors"):
        reference.overlay(tmp_path, world)
    save_file({"model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight has shape \(3,\), the model has \(32,\)"):
        reference.overlay(tmp_path, world)


# -- in the loss and in the reward ---------------------------------------------------------------------------------


def judged(
    model: Path, other: Path, world: World, algorithm: Algorithm, budget: int = 4096
) -> tuple[Policy, list[Any]]:
    policy = load_sharded(Policy, model, world.mesh)
    reference = Reference(policy)
    reference.overlay(other, world)
    return policy, make_samples(
        TRAJECTORIES, algorithm, Models(policy=policy, reference=reference), budget, world
    ).samples


@pytest.mark.parametrize("kl", ["loss", "reward"])
def test_scores_do_not_depend_on_microbatches(tiny_model: Path, other_model: Path, world: World, kl: Any) -> None:
    algorithm = Algorithm(kl=kl, kl_coef=0.1)
    _, whole = judged(tiny_model, other_model, world, algorithm)
    _, parts = judged(tiny_model, other_model, world, algorithm, budget=24)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(b.reference, a.reference, atol=1e-5)
        np.testing.assert_allclose(b.advantages, a.advantages, atol=1e-4)
        assert not a.reference[~a.tokens.loss_mask].any()
        assert not a.advantages[~a.tokens.loss_mask].any()
        assert (a.proximal is None) == (kl == "loss")


def test_scores_are_placed_at_their_own_tokens(tiny_model: Path, other_model: Path, world: World) -> None:
    _, samples = judged(tiny_model, other_model, world, Algorithm(kl_coef=0.1))
    other = load_sharded(Policy, other_model, world.mesh)
    for sample in samples:
        alone = collate(make_units([sample], 4096))
        with torch.no_grad():
            expected = other(alone)[0][alone.predictions_S]
        np.testing.assert_allclose(sample.reference[sample.tokens.loss_mask], expected, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_loss_moves_the_policy_to_its_reference(
    tiny_model: Path, other_model: Path, world: World, estimator: Any
) -> None:
    algorithm = Algorithm(kl_coef=0.5, kl_estimator=estimator, correction="none")
    policy, samples = judged(tiny_model, other_model, world, algorithm)
    config = TrainerConfig(algorithm=algorithm, lr=1e-3, grad_clip=100.0)
    optimizer = make_optimizer(policy, config)
    metrics = [update_policy(policy, optimizer, samples, 1, AGES, config, world) for _ in range(3)]
    if estimator == "k2":  # the one whose gradient is the divergence's
        assert metrics[-1]["kl_reference"] < metrics[0]["kl_reference"]
    assert metrics[0]["grad_norm"] > 0


def test_a_policy_equal_to_its_reference_has_no_divergence(tiny_model: Path, world: World) -> None:
    policy = load_sharded(Policy, tiny_model, world.mesh)
    algorithm = Algorithm(preset="rloo", kl_coef=0.1)
    models = Models(policy=policy, reference=Reference(policy))
    with_kl = make_samples(TRAJECTORIES, algorithm, models, 4096, world).samples
    without = make_samples(TRAJECTORIES, Algorithm(preset="rloo"), Models(policy=policy), 4096, world).samples
    for a, b in zip(with_kl, without, strict=True):
        np.testing.assert_allclose(a.advantages, b.advantages, atol=1e-6)
    config = TrainerConfig(algorithm=algorithm)
    metrics = update_policy(policy, make_optimizer(policy, config), with_kl, 1, AGES, config, world)
    assert metrics["kl_reference"] == pytest.approx(0, abs=1e-6)


def test_the_kl_penalty_lowers_the_reward_per_token(tiny_model: Path, other_model: Path, world: World) -> None:
    algorithm = Algorithm(preset="reinforce++", normalization="none", kl_coef=0.1)
    _, samples = judged(tiny_model, other_model, world, algorithm)
    for sample in samples:
        own = sample.tokens.loss_mask
        kl = (sample.proximal - sample.reference)[own].astype(np.float64)
        returns = sample.tokens.turn_returns[sample.tokens.turn_ids[own]]
        expected = [r - 0.1 * sum(kl[i:]) for i, r in enumerate(returns)]
        np.testing.assert_allclose(sample.advantages[own], expected, rtol=1e-5, atol=1e-5)
