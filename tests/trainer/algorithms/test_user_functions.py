"""Losses and advantages of the user: equal to the built-in ones where they compute the same, refused where invalid."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support import AGES, random_samples

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import ConfigError, UserError
from agentrl.trainer.algorithms.advantages import turn_advantages
from agentrl.trainer.algorithms.aggregation import token_weights
from agentrl.trainer.algorithms.losses import token_losses
from agentrl.trainer.algorithms.user_functions import Functions, LossFunction, user_advantages
from agentrl.trainer.distributed import World, full
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy


def grpo(tokens: Any, totals: Any, algorithm: Algorithm) -> Any:
    """GRPO's loss as a user would write it."""
    ratio_S = (tokens.logprobs_S - tokens.proximal_S).clamp(-20, 20).exp()
    weight_S = (tokens.proximal_S - tokens.behavior_S).clamp(-20, 20).exp().detach().clamp(max=5.0)
    gain_S = -tokens.advantages_S * ratio_S
    loss_S = weight_S * torch.maximum(gain_S, -tokens.advantages_S * ratio_S.clamp(0.8, 1.2))
    each_S = loss_S.new_full(loss_S.shape, 1 / totals.sequences)
    each_S = each_S / tokens.trajectories.spread(tokens.trajectories.lengths(loss_S))
    return (each_S * loss_S).sum(), {"weight": weight_S.sum(), "ones": float(len(loss_S))}


def losses_of_tokens(tokens: Any, totals: Any, algorithm: Algorithm) -> Any:
    return token_losses(tokens, algorithm)[0]


def share(tokens: Any, totals: Any, algorithm: Algorithm) -> Any:
    loss_S, _ = token_losses(tokens, algorithm)
    return (token_weights(loss_S, tokens.trajectories, totals, algorithm) * loss_S).sum()


def updated(
    model: Path, world: World, loss: LossFunction | None, **settings: Any
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    config = TrainerConfig(**{"lr": 1e-3, "tokens_per_microbatch": 40} | settings)
    policy = load_sharded(Policy, model, world.mesh)
    optimizer, samples = make_optimizer(policy, config), random_samples(groups=4)
    metrics = update_policy(policy, optimizer, samples, 1, AGES, config, world, loss=loss)
    return {name: full(p).clone() for name, p in policy.lm.named_parameters()}, metrics


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("loss", [grpo, losses_of_tokens, share])
def test_grpo_as_a_function_of_the_user_makes_the_same_parameters_bit_for_bit(
    tiny_model: Path, world: World, loss: LossFunction, minibatches: int
) -> None:
    expected, ours = updated(tiny_model, world, None, minibatches=minibatches)
    found, theirs = updated(tiny_model, world, loss, minibatches=minibatches)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (theirs["loss"], theirs["grad_norm"], theirs["entropy"]) == (
        ours["loss"],
        ours["grad_norm"],
        ours["entropy"],
    )
    assert "clip_fraction" in ours
    assert "clip_fraction" not in theirs  # the function's own business
    if loss is grpo:
        assert theirs["loss/ones"] == 1.0
        assert theirs["loss/weight"] == pytest.approx(ours["behavior_weight"], rel=1e-6)


def test_a_scalar_loss_does_not_depend_on_how_the_batch_is_cut(tiny_model: Path, world: World) -> None:
    whole, _ = updated(tiny_model, world, grpo, tokens_per_microbatch=100_000)
    cut, _ = updated(tiny_model, world, grpo)
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3.0, "returned float, not a scalar tensor"),
        (torch.zeros(2, 2), "returned a tensor of shape"),
        (torch.zeros(()), "the loss has no gradient"),
    ],
)
def test_an_invalid_loss_is_refused(tiny_model: Path, world: World, returned: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        updated(tiny_model, world, lambda *_: returned)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [({"a b": 1.0}, "no name of a metric"), ({"a": "x"}, "not a number"), ([1], "a mapping of at most 64")],
)
def test_invalid_metrics_are_refused(tiny_model: Path, world: World, metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        updated(tiny_model, world, lambda tokens, *_: (tokens.logprobs_S.sum(), metrics))


def test_advantages_of_turns_or_tokens() -> None:
    trajectories, algorithm = [s.tokens for s in random_samples()], Algorithm()
    turns = turn_advantages(trajectories, algorithm)
    by_turn = user_advantages(lambda *_: turns, trajectories, algorithm)
    by_token = user_advantages(lambda *_: [np.ones(len(t.input_ids)) for t in trajectories], trajectories, algorithm)
    for t, turn, found, ones in zip(trajectories, turns, by_turn, by_token, strict=True):
        sampled = t.turn_ids >= 0
        assert np.array_equal(found[sampled], turn[t.turn_ids[sampled]])
        assert not found[~sampled].any()
        assert np.array_equal(ones, sampled.astype(np.float32))


def test_advantages_of_another_length_are_refused() -> None:
    trajectories = [s.tokens for s in random_samples()]
    with pytest.raises(UserError, match="returned 1 items for 12 trajectories"):
        user_advantages(lambda *_: [0.0], trajectories, Algorithm())
    with pytest.raises(UserError, match=r"returned shape \(1,\) for trajectory g0-t0, which has 2 turns and 16 tokens"):
        user_advantages(lambda *_: [[0.0]] * 12, trajectories, Algorithm())


def test_functions_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_algorithm")
    vars(module).update(grpo=grpo, advantage=lambda trajectories, algorithm: [], short=lambda tokens: None)
    monkeypatch.setitem(sys.modules, "own_algorithm", module)
    names = {"loss": "own_algorithm:grpo", "advantage": "own_algorithm:advantage"}
    assert Functions.of(Algorithm(**names)) == Functions(loss=grpo, advantage=vars(module)["advantage"])
    assert Functions.of(Algorithm()) == Functions()
    with pytest.raises(UserError, match=r"trainer.algorithm.loss: .* is called with \(tokens, totals, algorithm\)"):
        Functions.of(Algorithm(loss="own_algorithm:short"))
    with pytest.raises((ConfigError, ValueError), match="advantage replaces the estimator"):
        Algorithm(preset="ppo", advantage="own_algorithm:advantage")
