"""float32 matrix products on AMD CPUs by oneDNN; by default PyTorch uses MKL.

MKL takes a slow path on processors other than Intel's. On an AMD EPYC with AVX-512, oneDNN does 1.8 to 2.3 times as
many operations per second, at the shapes of a 135M model. On an Intel Xeon oneDNN is as fast in the forward pass and
0.6 times as fast for a weight's gradient. On other processors and in other types this module uses PyTorch's products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def is_faster(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN is faster on this machine's processor than PyTorch's default."""
    have_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return have_both and cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()


PREFERRED = is_faster()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, (..., I) → (..., O). Does not copy strided arguments."""
    if not _applies(x):
        return nn.functional.linear(x, weight_OI, bias_O)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight_OI.shape[0])


def add_weight_gradient(sum_OI: Tensor, grad_MO: Tensor, x_MI: Tensor) -> None:
    """sum += gradᵀ · x, in float32."""
    if _applies(grad_MO):
        sum_OI += _product(grad_MO.t(), x_MI.t())
    elif grad_MO.dtype == torch.float32:
        sum_OI.addmm_(grad_MO.t(), x_MI)
    elif grad_MO.device.type == "cpu":  # which has no products of bfloat16 with a float32 result
        sum_OI += grad_MO.t() @ x_MI
    else:
        sum_OI += torch.mm(grad_MO.t(), x_MI, out_dtype=torch.float32)


class Linear(nn.Linear):
    """nn.Linear, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """The result of nn.Linear."""
        return linear(input, self.weight, self.bias)


def adopt(module: nn.Module) -> None:
    """Turn every plain nn.Linear inside `module` into `Linear`, in place. Parameters and names stay."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Linear


def _applies(x: Tensor) -> bool:
    return PREFERRED and x.device.type == "cpu" and x.dtype == torch.float32


def _product(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    y_MO: Tensor = torch.ops.mkldnn._linear_pointwise(x_MI, weight_OI, bias_O, "none", [], "")
    return y_MO


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MI, weight_OI)
        return _product(x_MI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MI, weight_OI = ctx.saved_tensors
        (grad_MO,) = grads
        dx, dweight, dbias = ctx.needs_input_grad
        return (
            _product(grad_MO, weight_OI.t()) if dx else None,
            _product(grad_MO.t(), x_MI.t()) if dweight else None,
            grad_MO.sum(0) if dbias else None,
        )
