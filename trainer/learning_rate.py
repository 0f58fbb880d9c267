"""The learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from agentrl.configs.trainer_config import UpdateConfig


def learning_rate(step: int, steps: int, config: UpdateConfig) -> float:
    """The learning rate of step 1 … `steps`.

    It rises linearly over w warm-up steps. Then it is lr, lr (1 − x) or lr (1 + cos πx)/2, where
    x = (step − 1 − w)/(steps − w).
    """
    done, warmup = step - 1, config.warmup_steps
    if done < warmup:
        return config.lr * step / (warmup + 1)
    x = (done - warmup) / max(1, steps - warmup)
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - x)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * x)) / 2


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the optimizer's next steps."""
    for group in optimizer.param_groups:
        group["lr"] = lr
