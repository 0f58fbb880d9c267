"""float32 matrix products on a CPU by oneDNN, which PyTorch otherwise leaves to MKL.

MKL takes a slow path on processors that are not Intel's: on an AMD EPYC with AVX-512 oneDNN does 1.8 to 2.3 times its
operations per second, at the shapes of a 135M model. On an Intel Xeon it does as many in the forward, and 0.6 times as
many for a weight's gradient. So elsewhere than on AMD, and in other types, these are the ordinary products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def is_faster(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor computes faster by oneDNN than by what PyTorch takes."""
    have_both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return have_both and cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text()


PREFERRED = is_faster()


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, for x of any number of dimensions. Strided arguments are not copied."""
    if not _applies(x):
        return nn.functional.linear(x, weight_OI, bias_O)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight_OI.shape[0])


def add_weight_gradient(sum_OI: Tensor, grad_MO: Tensor, x_MI: Tensor) -> None:
    """Add gradᵀ · x to a float32 sum."""
    if _applies(grad_MO):
        sum_OI += _product(grad_MO.t(), x_MI.t())
    elif grad_MO.dtype == torch.float32:
        sum_OI.addmm_(grad_MO.t(), x_MI)
    else:
        sum_OI += grad_MO.t() @ x_MI


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        return linear(input, self.weight, self.bias)


def adopt(module: nn.Module) -> None:
    """Turn every plain nn.Linear inside `module` into ours, in place; parameters and their names stay."""
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
