"""oneDNN products are PyTorch's, gradients included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.trainer.models import onednn
from agentrl.trainer.models.onednn import add_weight_gradient, adopt, is_faster, linear


@pytest.fixture(autouse=True, params=[True, False], ids=["onednn", "ordinary"])
def preferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    monkeypatch.setattr(onednn, "PREFERRED", request.param)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
def test_a_linear_layer_and_its_gradients_equal_pytorchs(bias: bool, shape: tuple[int, ...]) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradients_add_up(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, x, total = torch.randn(5, 6).to(dtype), torch.randn(5, 8).to(dtype), torch.ones(6, 8)
    add_weight_gradient(total, grad, x)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(total.double(), 1 + grad.double().t() @ x.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("vendor", "faster"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, False)])
def test_onednn_is_used_where_mkl_is_slow(tmp_path: Path, vendor: str | None, faster: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if vendor:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    assert is_faster(cpuinfo) == (faster and torch.backends.mkl.is_available())
