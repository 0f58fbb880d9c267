"""AdamW over a model's trained parameters: how it is made, how gradients are clipped, and its moments by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from agentrl.configs.trainer_config import UpdateConfig

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""


class Trainable(Protocol):
    """A model, as optimizers and checkpoints see it."""

    def trainable(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Trained parameters by name, in a fixed order."""


def make_optimizer(model: Trainable, config: UpdateConfig, lr: float | None = None) -> torch.optim.AdamW:
    """AdamW over the trained parameters, at `lr` or else at the configured learning rate."""
    groups: Any = [{"params": group} for group in by_mesh(model)]
    return torch.optim.AdamW(
        groups, lr=lr or config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
    )


def by_mesh(model: Trainable) -> list[list[nn.Parameter]]:
    """The trained parameters, grouped by device mesh: fused operations take tensors of one mesh."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for _, parameter in model.trainable():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def clip_gradients(model: Trainable, limit: float) -> float:
    """Scale the gradients so that their norm is at most `limit`. Returns the norm before. Collective."""
    norm = gradient_norm(model)
    for group in _with_gradient(model):
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return float(norm)


def gradient_norm(model: Trainable) -> Tensor:
    """The norm of all gradients, 0-dim. Collective."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in _with_gradient(model)]
    norm: Tensor = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    return norm


def _with_gradient(model: Trainable) -> list[list[nn.Parameter]]:
    return [[p for p in group if p.grad is not None] for group in by_mesh(model)]


def moments(model: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state of the trained parameters by name, sharded as the parameters are."""
    return {
        f"{name}/{moment}": optimizer.state[p][moment]
        for name, p in model.trainable()
        if p in optimizer.state
        for moment in MOMENTS
    }
