"""oneDNN products are PyTorch's, gradients included."""

from __future__ import annotations

import pytest
import torch

from agentrl.trainer.onednn import adopt, linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_linear_and_its_gradients(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(shape), torch.randn(6, 8), *([torch.randn(6)] if bias else [])]
    exact = [t.double().requires_grad_() for t in ours]
    for t in ours:
        t.requires_grad_()
    y, expected = linear(*ours), torch.nn.functional.linear(*exact)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_adopted_modules_keep_their_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False)))
    x = torch.randn(7, 4)
    names, expected = [n for n, _ in module.named_parameters()], module(x)
    adopt(module)
    assert [n for n, _ in module.named_parameters()] == names
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-6)
