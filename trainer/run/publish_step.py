"""Brings the engines to a new weight version."""

from __future__ import annotations

import time
from functools import partial

import torch

from agentrl.trainer.run.evaluation_hold import wait_for_evaluation
from agentrl.trainer.run.trainer_state import Trainer

WAITING = "rank 0 waits"


def publish(t: Trainer, version: int, tensors: dict[str, torch.Tensor]) -> None:
    """Bring the engines to `version`, which has these tensors. When stopped first, the next start republishes it.

    Collective: the other ranks hear from rank 0 as long as it tries.
    """
    start = time.time()
    if not wait_for_evaluation(t, version):
        return
    if t.lineage is None:
        while t.world.share(None):
            continue
        return
    assert t.publisher is not None
    begun = time.time()
    try:
        done = t.publisher.publish(version, t.lineage.epoch, tensors, partial(t.world.share, WAITING))
    finally:
        t.world.share(None)
    t.publish_s = time.time() - start
    if done:
        t.lineage.record("wait_for_publish", begun, time.time(), version=version)
