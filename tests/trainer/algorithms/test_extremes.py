"""Losses and gradients are finite however far apart policies are, and unchanged where they are near."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from padded import random_batch
from part_values import levels_and_clips, values
from thoroughness import examples
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.configs.presets import PRESETS
from agentrl.trainer.algorithms.aggregation import Totals
from agentrl.trainer.algorithms.corrections import second_moment_limit, under_limit
from agentrl.trainer.algorithms.kl import kl_divergence
from agentrl.trainer.algorithms.losses import LossTokens, policy_loss
from agentrl.trainer.algorithms.packed_rows import Rows
from agentrl.trainer.algorithms.preference import bradley_terry_losses, dpo_losses, ipo_losses
from agentrl.trainer.metrics.batch_metrics import drift_metrics, mismatch_metrics, ratio_metrics

FARTHEST = 1e4
gaps = st.floats(-FARTHEST, FARTHEST, width=32)
tokens_of_a_batch = st.lists(
    st.tuples(gaps, gaps, gaps, st.floats(-10, 10, width=32), st.integers(0, 3)), min_size=1, max_size=12
)
LEVELS = values("ratio")
EVERY: list[dict[str, Any]] = [
    *({"preset": name, "kl_coef": 0.1, "kl": "loss"} for name in PRESETS if name != "ppo"),
    {"preset": "ppo", "dual_clip": 3.0},
    {"preset": "grpo", "dual_clip": 3.0, "correction": "mask", "correction_floor": 0.1},
    {"preset": "gspo", "m2_threshold": 0.04},
    {"preset": "gspo", "ratio": "turn", "correction": "reject", "correction_level": "turn"},
    {"preset": "sapo", "ratio": "product", "correction_level": "product", "correction_cap": 1e30},
    *({"ratio": level, "clip": clip} for level, clip in levels_and_clips()),
    *({"correction": how, "correction_level": level} for level in LEVELS for how in values("correction")),
    *({"kl_coef": 0.3, "kl_estimator": estimator, "entropy_coef": 0.1} for estimator in values("kl_estimator")),
    *({"aggregation": how} for how in values("aggregation")),
]


def batch(drawn: list[tuple[float, float, float, float, int]]) -> tuple[LossTokens, Tensor]:
    """float32 tokens of up to four trajectories, and the leaf that has the gradient."""
    drawn = sorted(drawn, key=lambda token: token[-1])
    to_proximal, to_behavior, to_reference, advantages = (
        torch.tensor([token[i] for token in drawn], dtype=torch.float32) for i in range(4)
    )
    rows = Rows(torch.tensor([token[-1] for token in drawn]), 4)
    logprobs = torch.full_like(to_proximal, -1.0).requires_grad_()
    return LossTokens(
        logprobs_S=logprobs,
        proximal_S=-1 - to_proximal,
        behavior_S=-1 - to_proximal - to_behavior,
        reference_S=-1 - to_reference,
        advantages_S=advantages,
        trajectories=rows,
        turns=rows,
        entropy_S=torch.ones_like(advantages).requires_grad_(),
    ), logprobs


@settings(max_examples=examples(20))
@given(tokens_of_a_batch)
@example([(100.0, 0.0, 0.0, 1.0, 0), (0.1, 0.0, 0.0, 1.0, 0)])
@example([(100.0, 0.0, -12.0, -1.0, 0)])
@example([(FARTHEST, -FARTHEST, -FARTHEST, -10.0, 0), (-FARTHEST, FARTHEST, FARTHEST, 10.0, 1)])
def test_losses_gradients_and_metrics_are_finite(drawn: list[tuple[float, float, float, float, int]]) -> None:
    for parts in EVERY:
        algorithm = Algorithm(**parts)
        tokens, logprobs = batch(drawn)
        if algorithm.m2_threshold is not None:
            log_ratios = (tokens.logprobs_S - tokens.behavior_S).detach()
            keep = under_limit(log_ratios, second_moment_limit(log_ratios, algorithm.m2_threshold))
            tokens = dataclasses.replace(tokens, keep_S=keep)
        if algorithm.kl_cov:
            tokens = dataclasses.replace(tokens, far_S=torch.ones(len(drawn), dtype=torch.bool))
        loss, sums = policy_loss(tokens, Totals(float(len(drawn)), 4.0), algorithm)
        loss.backward()
        assert torch.isfinite(loss), parts
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all(), parts
        assert all(torch.isfinite(value) for value in sums.values()), (parts, sums)


@settings(max_examples=examples(20))
@given(st.lists(gaps, min_size=1, max_size=12))
def test_figures_and_losses_of_pairs_are_finite(drawn: list[float]) -> None:
    gap = torch.tensor(drawn)
    for measure in (ratio_metrics, mismatch_metrics, drift_metrics):
        assert all(math.isfinite(value) for value in measure(gap).values())
    for losses in (lambda h: dpo_losses(h, 0.5, 0.1), lambda h: ipo_losses(h, 0.1), bradley_terry_losses):
        margins = gap.clone().requires_grad_()
        found = losses(margins)
        found.sum().backward()
        assert torch.isfinite(found).all()
        assert margins.grad is not None
        assert torch.isfinite(margins.grad).all()


def test_a_token_that_m2po_masks_has_no_gradient_and_adds_nothing() -> None:
    tokens, logprobs = batch([(100.0, 0.0, 0.0, -1.0, 0), (0.1, 0.0, 0.0, -1.0, 0)])
    kept = dataclasses.replace(tokens, keep_S=torch.tensor([False, True]))
    loss, _ = policy_loss(kept, Totals(2.0, 1.0), Algorithm(preset="m2po"))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(math.exp(0.1) / 2)
    assert gradient.tolist() == pytest.approx([0.0, math.exp(0.1) / 2])


def test_a_token_that_m2po_masks_is_counted_as_masked_and_not_as_clipped() -> None:
    tokens, _ = batch([(100.0, 0.0, 0.0, 1.0, 0), (0.1, 0.0, 0.0, 1.0, 0), (0.1, 0.0, 0.0, 1.0, 0)])
    kept = dataclasses.replace(tokens, keep_S=torch.tensor([False, True, True]))
    _, sums = policy_loss(kept, Totals(3.0, 1.0), Algorithm(preset="m2po", clip="ppo"))
    assert sums["masked_fraction"] == 1
    assert sums["clip_fraction"] == 0


@pytest.mark.parametrize("preset", ["grpo", "gspo", "sapo", "rloo", "dapo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_at_its_bound_has_no_gradient(preset: str, advantage: float) -> None:
    tokens, logprobs = batch([(100.0, 0.0, 0.0, advantage, 0)])
    loss, _ = policy_loss(tokens, Totals(1.0, 1.0), Algorithm(preset=preset))
    assert torch.autograd.grad(loss, logprobs)[0].tolist() == [0.0]


def test_k3_goes_up_to_10_as_verl_and_areal_have_it() -> None:
    difference = torch.tensor([-12.0, -2.7, -2.6, -1.0, 0.0, 3.0, 10.9, 50.0], dtype=torch.float64)
    difference.requires_grad_()
    found = kl_divergence(difference, torch.zeros(8, dtype=torch.float64), "k3")
    exact = torch.exp(-difference) - 1 + difference
    assert found[[0, 1, 7]].tolist() == [10.0, 10.0, 10.0]
    torch.testing.assert_close(found[2:7], exact[2:7], rtol=1e-12, atol=1e-15)
    (gradient,) = torch.autograd.grad(found.sum(), difference)
    assert gradient[[0, 1, 7]].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(gradient[2:7], (1 - torch.exp(-difference))[2:7].detach())


@pytest.mark.parametrize("parts", [p for p in EVERY if "m2_threshold" not in p], ids=str)
def test_near_policies_have_the_formula_without_bounds(parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, near = Algorithm(**parts), random_batch(4)
    bounded, _ = near.loss(algorithm)
    for bound in ("LARGEST_LOG_RATIO", "LARGEST_K3"):
        monkeypatch.setattr(f"agentrl.trainer.algorithms.bounds.{bound}", float("inf"))
    free, _ = near.loss(algorithm)
    assert torch.equal(bounded, free)
    assert torch.equal(*(torch.autograd.grad(loss, near.logprobs)[0] for loss in (bounded, free)))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("field", ["proximal_S", "behavior_S", "reference_S"])
def test_bounds_do_not_hide_what_is_not_finite(field: str, bad: float) -> None:
    tokens, _ = batch([(0.1, 0.1, 0.1, 1.0, 0)])
    tokens = dataclasses.replace(tokens, **{field: torch.tensor([bad])})
    loss, sums = policy_loss(tokens, Totals(1.0, 1.0), Algorithm(clip="none", kl_coef=0.1))
    figures = [loss, sums["approx_kl"], sums["behavior_weight"], (tokens.logprobs_S - tokens.behavior_S).sum()]
    assert not all(torch.isfinite(figure) for figure in figures)
