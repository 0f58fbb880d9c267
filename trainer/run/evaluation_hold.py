"""`evaluation.hold`: no other weights are published while those that are served are evaluated.

The trainer alone waits, and only before a publish; whatever it has trained is durable by then. What it waits for is
derived from the store's rows, so nothing is locked: a trainer that is killed meanwhile waits again when it resumes.
"""

from __future__ import annotations

import time

from agentrl.store import evaluation_episodes
from agentrl.trainer.run.trainer_state import Trainer

POLL_S = 1.0


def wait_for_evaluation(t: Trainer, version: int) -> bool:
    """Wait until `version` may be published; false when told to stop first. Collective.

    After `evaluation.hold_timeout_s` it may in any case: the evaluation then says which versions sampled it.
    """
    if not t.config.evaluation.hold:
        return True
    start, held, stopping = time.time(), True, False
    while held and not stopping:
        if t.lineage:
            in_time = time.time() - start < t.config.evaluation.hold_timeout_s
            held = in_time and t.lineage.database.query(evaluation_episodes.holds, t.lineage.run_id, version, t.config)
            stopping = held and (t.stop.wait(POLL_S) or t.lineage.is_stopping())
        held, stopping = t.world.share((held, stopping))
    if t.lineage:
        t.lineage.record("wait_for_evaluation", start, time.time(), version=version)
    return not stopping
