"""Brings the engines to a new weight version."""

from __future__ import annotations

import time
from functools import partial

import torch

from agentrl.trainer.run.evaluation_hold import wait_for_evaluation
from agentrl.trainer.run.trainer_state import Trainer

WAITING = "rank 0 waits"
"""What rank 0 shares while it tries, so that the collectives of the other ranks do not time out."""


def publish(t: Trainer, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Bring the engines to `version`, which has these tensors. When stopped first, the next start republishes it.

    Collective: rank 0 shares WAITING after each attempt that failed, and None at the end; the other ranks receive.
    """
    start = time.time()
    if not wait_for_evaluation(t, version):
        return
    begun = time.time()
    if t.world.leads:
        try:
            done = t.publisher.publish(version, t.lineage.epoch, tensors, partial(t.world.share, WAITING))
        finally:
            t.world.share(None)
    else:
        done = False
        while t.world.share(None):
            continue
    t.publish_s = time.time() - start
    if done:
        t.lineage.record("wait_for_publish", begun, time.time(), version=version)
