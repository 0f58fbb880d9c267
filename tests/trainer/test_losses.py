"""The loss against an independent float64 implementation, token by token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentrl.trainer.head import token_logprobs
from agentrl.trainer.losses import decoupled_policy_loss, mismatch_sums


def reference_loss(
    logprob: float, proximal: float, behavior: float, advantage: float, low: float, high: float, cap: float
) -> tuple[float, float]:
    """Loss of one token and its derivative in `logprob`, by cases instead of by max."""
    ratio = math.exp(logprob - proximal)
    weight = min(math.exp(proximal - behavior), cap)
    if advantage >= 0 and ratio > 1 + high:
        return -weight * advantage * (1 + high), 0.0
    if advantage < 0 and ratio < 1 - low:
        return -weight * advantage * (1 - low), 0.0
    return -weight * advantage * ratio, -weight * advantage * ratio


@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proximal, advantages = rng.normal(-2, 1, 200), rng.normal(0, 1, 200)
    logprobs, behavior = proximal + rng.normal(0, 0.4, 200), proximal + rng.normal(0, 1.5, 200)
    settings = {"low": 0.2, "high": 0.28, "cap": 2.0}
    expected = np.array(
        [reference_loss(*row, **settings) for row in zip(logprobs, proximal, behavior, advantages, strict=True)]
    )

    current = torch.tensor(logprobs, requires_grad=True)
    loss, sums = decoupled_policy_loss(
        current,
        torch.tensor(proximal),
        torch.tensor(behavior),
        torch.tensor(advantages),
        eps_low=0.2,
        eps_high=0.28,
        behavior_weight_cap=2.0,
    )
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected[:, 0].sum(), rtol=1e-12)
    np.testing.assert_allclose(current.grad.numpy(), expected[:, 1], rtol=1e-12)
    assert sums["clip_fraction"].item() == (expected[:, 1] == 0).sum() > 0
    assert sums["behavior_weight_capped"].item() == (proximal - behavior > math.log(2.0)).sum() > 0


def test_on_policy_the_gradient_is_plain_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = logprobs.detach()
    advantages = torch.tensor([0.5, -1.5], dtype=torch.float64)
    loss, sums = decoupled_policy_loss(
        logprobs, old, old, advantages, eps_low=0.2, eps_high=0.2, behavior_weight_cap=5.0
    )
    loss.backward()
    assert logprobs.grad.tolist() == [-0.5, 1.5]
    assert sums["approx_kl"].item() == 0


def test_mismatch_counts_only_tokens_of_the_current_version() -> None:
    sums = mismatch_sums(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -1.0]), torch.tensor([4, 4, 3]), version=4
    )
    assert {k: v.item() for k, v in sums.items()} == {
        "mismatch": 0.5,
        "mismatch_tokens": 2,
        "drift": 2,
        "drift_tokens": 1,
    }


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
def test_chunked_logprobs_equal_log_softmax(trained_head: bool, chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(50, 8, requires_grad=trained_head)
    targets, temperatures = torch.randint(0, 50, (10,)), torch.linspace(0.5, 1.5, 10)
    upstream = torch.randn(10)
    hidden.requires_grad_(True)

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, chunk)
    (logprobs * upstream).sum().backward()

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    full = torch.log_softmax(exact_hidden @ exact_weight.T / temperatures.double()[:, None], -1)
    exact = full[range(10), targets]
    (exact * upstream).sum().backward()
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-6)
    if trained_head:
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-6)
