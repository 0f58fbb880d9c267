"""`evaluation.hold`: keeps a new version unpublished while the version that is served is evaluated.

The trainer waits before a publish, when its step is durable already. It reads from the store whether the evaluation is
complete and takes no lock, so a trainer that was killed while it waited waits again after its resume.
"""

from __future__ import annotations

import time

from agentrl.trainer.run.trainer_state import Trainer

POLL_S = 1.0


def wait_for_evaluation(t: Trainer, version: int) -> bool:
    """Wait until `version` may be published; false when told to stop first. Collective.

    The wait ends after `evaluation.hold_timeout_s`; the evaluation then records which versions sampled it.
    """
    if not t.config.evaluation.hold:
        return True
    start, held, stopping = time.time(), True, False
    while held and not stopping:
        in_time = time.time() - start < t.config.evaluation.hold_timeout_s
        held = in_time and t.lineage.is_held(version)
        stopping = held and (t.stop.wait(POLL_S) or t.lineage.is_stopping())
        held, stopping = t.world.share((held, stopping))
    t.lineage.record("wait_for_evaluation", start, time.time(), version=version)
    return not stopping
