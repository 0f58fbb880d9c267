"""The logprobs that losses are computed from; the losses themselves: algorithms/."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.models.head import head_of, logits_of, token_logprobs


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


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_logits_of_bfloat16_are_not_rounded(trained_head: bool, kept_bytes: int) -> None:
    """Sums in float32 of products of bfloat16 numbers, which float32 holds exactly; logits are of size 16."""
    torch.manual_seed(0)
    hidden = torch.randn(40, 64).bfloat16().requires_grad_()
    weight = (2 * torch.randn(300, 64)).bfloat16().requires_grad_(trained_head)
    targets, temperatures = torch.randint(0, 300, (40,)), torch.linspace(0.5, 1.5, 40)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, 16, kept_bytes=kept_bytes)
    logprobs.sum().backward()

    full = torch.log_softmax(hidden.double() @ weight.double().T / temperatures.double()[:, None], -1)
    torch.testing.assert_close(logprobs.double(), full[range(40), targets], rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1), rtol=0, atol=1e-4)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_on_a_device_that_is_no_cpu_are_float32_without_a_float32_copy_of_the_head(dtype: torch.dtype) -> None:
    weight = torch.empty(50, 8, dtype=dtype, device="meta")
    assert head_of(weight) is weight
    assert logits_of(torch.empty(3, 8, dtype=dtype, device="meta"), weight).dtype == torch.float32
