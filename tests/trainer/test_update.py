"""What an update moves, costs and measures. How it is cut changes nothing: test_invariance.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import AGES, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.packing import Microbatch, Sample, collate, make_units
from agentrl.trainer.update import update_policy

TIGHT = {"clip_low": 1e-4, "clip_high": 1e-4}


def updated(
    model: Path, world: World, samples: list[Sample], **settings: object
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    config = TrainerConfig(**{"lr": 1e-3} | settings)
    policy = load_sharded(Policy, model, world.mesh, train_layers=config.train_layers)
    metrics = update_policy(policy, make_optimizer(policy, config), samples, 1, AGES, config, world)
    return {name: full(p).clone() for name, p in policy.lm.named_parameters()}, metrics


def test_frozen_layers_stay_and_top_layers_move(tiny_model: Path, world: World) -> None:
    before, _ = updated(tiny_model, world, [_without_advantage(s) for s in random_samples()], train_layers=1)
    after, _ = updated(tiny_model, world, random_samples(), train_layers=1)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {n for n in before if n.startswith("model.layers.2.") or n == "model.norm.weight"}


def test_groups_without_advantage_count_in_the_mean_but_cost_no_backward(tiny_model: Path, world: World) -> None:
    learning = random_samples(groups=1)
    silent = [_without_advantage(s) for s in random_samples(seed=1, groups=2)[4:]]
    _, alone = updated(tiny_model, world, learning)
    _, both = updated(tiny_model, world, learning + silent)
    share = alone["tokens_trained"] / both["tokens_trained"]
    assert share < 1
    assert both["loss"] == pytest.approx(alone["loss"] * share, rel=1e-5)
    assert both["grad_norm"] == pytest.approx(alone["grad_norm"] * share, rel=1e-4)


def test_after_a_batch_without_advantage_the_optimizer_still_knows_its_parameters(
    tiny_model: Path, world: World
) -> None:
    policy, config = load_sharded(Policy, tiny_model, world.mesh), TrainerConfig()
    optimizer = make_optimizer(policy, config)
    for samples in (random_samples(), [_without_advantage(s) for s in random_samples()]):
        update_policy(policy, optimizer, samples, 1, AGES, config, world)
        assert all(parameter in optimizer.state for _, parameter in policy.trainable())


def test_several_minibatches_clip_against_the_policy_before_the_first_update(tiny_model: Path, world: World) -> None:
    _, metrics = updated(tiny_model, world, random_samples(groups=4), minibatches=2, algorithm=TIGHT)
    assert metrics["clip_fraction"] > 0
    _, single = updated(tiny_model, world, random_samples(groups=4), minibatches=1, algorithm=TIGHT)
    assert single["clip_fraction"] == 0


def test_interpolation_is_exact_until_something_has_moved(tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples())
    exact, _ = updated(tiny_model, world, samples, algorithm={"proximal": "recompute"})
    without, _ = updated(tiny_model, world, samples, algorithm={"proximal": "interpolate"})
    for name in exact:
        torch.testing.assert_close(without[name], exact[name], rtol=0, atol=1e-7)


def test_interpolation_needs_no_forward_of_its_own(
    tiny_model: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = 0
    real = Policy.forward

    def counted(self: Policy, batch: Microbatch, **asked: Any) -> tuple[torch.Tensor, ...]:
        nonlocal forwards
        forwards += 1
        return real(self, batch, **asked)

    monkeypatch.setattr(Policy, "forward", counted)
    made = {}
    for proximal in ("recompute", "interpolate"):
        forwards = 0
        updated(tiny_model, world, random_samples(groups=4), minibatches=2, algorithm={"proximal": proximal})
        made[proximal] = forwards
    assert made == {"recompute": 4, "interpolate": 2}


def test_the_second_moment_mask_leaves_outliers_out(tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples())
    _, metrics = updated(tiny_model, world, samples, algorithm="m2po")
    assert 0 < metrics["masked_fraction"] < 1
    _, strict = updated(tiny_model, world, samples, algorithm={"preset": "m2po", "m2_threshold": 1e-12})
    assert strict["masked_fraction"] == 1
    assert strict["grad_norm"] == 0


def test_masked_tokens_out_of_the_mean_are_as_tokens_out_of_the_loss(tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples())
    rejecting = {"correction": "reject", "correction_cap": 1.2, "correction_floor": 0.8, "masked_in_mean": "none"}
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum"):
        own, metrics = updated(tiny_model, world, samples, algorithm=rejecting | {"aggregation": aggregation})
        assert 0 < metrics["behavior_weight_capped"] < 1
        left = [_inside(s, tiny_model, world) for s in samples]
        expected, _ = updated(tiny_model, world, left, algorithm={"correction": "none", "aggregation": aggregation})
        for name in expected:
            torch.testing.assert_close(own[name], expected[name], rtol=0, atol=1e-5)  # of a step of 1e-3


def test_trajectories_that_are_masked_as_a_whole_may_count(tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples())
    rejecting = {"correction": "reject", "correction_level": "sequence", "aggregation": "sequence_mean"}
    bounds = {"correction_cap": 1.1, "correction_floor": 0.9}
    losses = {}
    for counted in ("trajectories", "none"):
        _, metrics = updated(tiny_model, world, samples, algorithm=rejecting | bounds | {"masked_in_mean": counted})
        losses[counted] = metrics["loss"]
    weights = [np.exp(_log_weights(s, tiny_model, world).mean()) for s in samples]
    inside = sum(0.9 <= weight <= 1.1 for weight in weights)
    assert 0 < inside < len(samples)
    assert losses["trajectories"] == pytest.approx(losses["none"] * inside / len(samples), rel=1e-5)


@pytest.mark.parametrize("preset", ["clip_cov", "kl_cov"])
def test_tokens_of_high_covariance_change_the_step(preset: str, tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples(groups=4))
    share = {"clip_cov": {"clip_cov": 0.3, "clip_cov_low": 0.01}, "kl_cov": {"kl_cov": 0.3}}[preset]
    off: dict[str, Any] = {"clip_cov": {"clip_cov": None}, "kl_cov": {"kl_cov": None}}[preset]
    chosen, metrics = updated(tiny_model, world, samples, algorithm={"preset": preset} | share, minibatches=2)
    plain, _ = updated(tiny_model, world, samples, algorithm={"preset": preset} | off, minibatches=2)
    assert any(not torch.equal(chosen[name], plain[name]) for name in plain)
    if preset == "clip_cov":
        assert 0 < metrics["masked_fraction"] <= 0.3


def test_normalised_weights_have_mean_1(tiny_model: Path, world: World) -> None:
    samples = near_policy(tiny_model, world, random_samples())
    _, metrics = updated(tiny_model, world, samples, algorithm={"correction_normalize": True, "correction_cap": 2.0})
    assert metrics["behavior_weight"] == pytest.approx(1)


def test_the_entropy_bonus_raises_the_entropy_of_every_group(tiny_model: Path, world: World) -> None:
    samples = [_without_advantage(s) for s in near_policy(tiny_model, world, random_samples())]
    settings = {"algorithm": {"entropy_coef": 0.1}, "minibatches": 2, "lr": 1e-3}
    _, metrics = updated(tiny_model, world, samples, **settings)
    assert metrics["loss"] < 0 < metrics["grad_norm"]
    policy = load_sharded(Policy, tiny_model, world.mesh)
    config = TrainerConfig(algorithm={"entropy_coef": 0.1}, lr=1e-3)
    optimizer = make_optimizer(policy, config)
    entropies = [update_policy(policy, optimizer, samples, 1, AGES, config, world)["entropy"] for _ in range(4)]
    assert entropies == sorted(entropies)


def near_policy(model: Path, world: World, samples: list[Sample]) -> list[Sample]:
    """The same, as if sampled by a policy that is not far from the model, but for a few tokens."""
    rng = np.random.default_rng(0)
    policy = load_sharded(Policy, model, world.mesh)
    near = []
    for sample in samples:
        (unit,) = make_units([sample], 4096)
        batch = collate([unit])
        with torch.no_grad():
            logprobs = policy(batch)[0][batch.predictions_S].numpy()
        far = rng.random(len(logprobs)) < 0.1
        recorded = sample.tokens.logprobs.copy()
        recorded[sample.tokens.loss_mask] = logprobs + rng.normal(0, np.where(far, 2.0, 0.1))
        near.append(dataclasses.replace(sample, tokens=dataclasses.replace(sample.tokens, logprobs=recorded)))
    return near


def _without_advantage(sample: Sample) -> Sample:
    return dataclasses.replace(sample, advantages=np.zeros_like(sample.advantages))


def _inside(sample: Sample, model: Path, world: World) -> Sample:
    """The sample without the loss tokens whose weight lies outside 0.8 to 1.2."""
    weight = np.exp(_log_weights(sample, model, world))
    mask = sample.tokens.loss_mask.copy()
    mask[mask] = (weight >= 0.8) & (weight <= 1.2)
    return dataclasses.replace(sample, tokens=dataclasses.replace(sample.tokens, loss_mask=mask))


def _log_weights(sample: Sample, model: Path, world: World) -> np.ndarray:
    """log π/π_behaviour of the loss tokens."""
    policy = load_sharded(Policy, model, world.mesh)
    batch = collate(make_units([sample], 4096))
    with torch.no_grad():
        logprobs = policy(batch)[0][batch.predictions_S].numpy()
    return logprobs - sample.tokens.logprobs[sample.tokens.loss_mask]
