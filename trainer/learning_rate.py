"""The learning rate as a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from agentrl.configs.trainer_config import Schedule, TrainerConfig, UpdateConfig


def learning_rate(step: int, steps: int, lr: float, schedule: Schedule, warmup: int) -> float:
    """The learning rate of step 1 … `steps`.

    It rises linearly over w warm-up steps. Then it is lr, lr (1 − x) or lr (1 + cos πx)/2, where
    x = (step − 1 − w)/(steps − w).
    """
    done = step - 1
    if done < warmup:
        return lr * step / (warmup + 1)
    x = (done - warmup) / max(1, steps - warmup)
    match schedule:
        case "constant":
            return lr
        case "linear":
            return lr * (1 - x)
        case "cosine":
            return lr * (1 + math.cos(math.pi * x)) / 2


def policy_rate(step: int, steps: int, config: UpdateConfig) -> float:
    """The configured learning rate of a step."""
    return learning_rate(step, steps, config.lr, config.lr_schedule, config.warmup_steps)


def critic_rate(step: int, steps: int, config: TrainerConfig) -> float:
    """The critic's learning rate of a step, by its own schedule where it has one."""
    schedule = config.critic_lr_schedule or config.lr_schedule
    return learning_rate(step, steps, config.critic_lr, schedule, config.warmup_steps)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the optimizer's next steps."""
    for group in optimizer.param_groups:
        group["lr"] = lr
