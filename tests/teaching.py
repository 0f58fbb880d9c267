"""Trains a small model by heart: AdamW on a few losses, then sharper logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP_STEPS = 20


def teach(model: Any, loss_of: Callable[[int], Tensor], *, steps: int, learning_rate: float, sharpness: float) -> None:
    """Minimise `loss_of(step)` for steps 1 … `steps`, warming up and cooling down; then multiply the logits."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    for step in range(1, steps + 1):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(step / WARM_UP_STEPS, 1 - step / (steps + 1), 1)
        optimizer.step()
    with torch.no_grad():
        model.model.norm.weight.mul_(sharpness)
