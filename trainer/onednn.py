"""float32 matrix products on a CPU by oneDNN, which PyTorch otherwise leaves to MKL.

MKL takes a slow path on processors that are not Intel's: on an AMD EPYC with AVX-512 oneDNN does 1.8 to 2.3 times its
operations per second, at the shapes of a 135M model. Elsewhere, and in other types, this is the ordinary product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HAVE_ONEDNN = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, for x of any number of dimensions. Strided arguments are not copied."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or not HAVE_ONEDNN:
        return nn.functional.linear(x, weight_OI, bias_O)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], weight_OI.shape[0])


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
