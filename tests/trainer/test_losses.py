"""The logprobs that losses are computed from; the losses themselves: algorithms/."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.head import token_logprobs


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("kept_bytes", [0, 1400, 2**20])
def test_chunked_logprobs_equal_log_softmax(
    trained_head: bool, chunk: int, entropy_gradient: bool, kept_bytes: int
) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(10, 8), torch.randn(50, 8, requires_grad=trained_head)
    targets, temperatures = torch.randint(0, 50, (10,)), torch.linspace(0.5, 1.5, 10)
    upstream, toward_entropy = torch.randn(10), torch.randn(10) * entropy_gradient
    hidden.requires_grad_(True)

    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperatures, chunk, entropy_gradient=entropy_gradient, kept_bytes=kept_bytes
    )
    assert entropy.requires_grad == entropy_gradient
    (logprobs * upstream + entropy * toward_entropy).sum().backward()

    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    full = torch.log_softmax(exact_hidden @ exact_weight.T / temperatures.double()[:, None], -1)
    exact = full[range(10), targets]
    exact_entropy = -(full.exp() * full).sum(-1)
    (exact * upstream + exact_entropy * toward_entropy).sum().backward()
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact_entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-6)
    if trained_head:
        torch.testing.assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=1e-6)
