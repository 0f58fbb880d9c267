"""A filter and advantages that see whole groups and the whole batch, for runs on one rank and on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.training_run import TrainingRun


def accepted(group: Sequence[TrajectoryTokens]) -> bool | str:
    """Leave out about a third of all groups."""
    return int(sum(int(t.input_ids.sum()) for t in group)) % 3 > 0 or "a third"


def ranked(batch: Sequence[TrajectoryTokens], _: Algorithm) -> list[Any]:
    """The place of each trajectory in the batch by its first logprob; for every second one, token by token."""
    order = np.argsort([float(t.logprobs.sum()) for t in batch])
    places = np.empty(len(batch), np.float32)
    places[order] = np.arange(len(batch)) - len(batch) // 2
    return [
        np.full(len(t.input_ids) if i % 2 else len(t.turn_returns), places[i], np.float32) for i, t in enumerate(batch)
    ]


def trained(run: TrainingRun) -> list[float]:
    """Train with both; returns the loss of each step."""
    losses = []
    while (batch := run.prepare_batch(accepted)) is not None:
        losses.append(run.update(batch, advantage=ranked)["loss"])
        run.publish()
    return losses
