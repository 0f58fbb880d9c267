"""`evaluation.hold`: no other weights are published while those that are served are evaluated.

The trainer alone waits, and only before a publish; whatever it has trained is durable by then. What it waits for is
derived from the store's rows, so nothing is locked: a trainer that is killed meanwhile waits again when it resumes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from agentrl.config import RunConfig
from agentrl.evaluation import schedule
from agentrl.schemas import VersionState
from agentrl.store import evaluations, runs

if TYPE_CHECKING:
    from agentrl.trainer.loop import Trainer

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
            held = in_time and t.lineage.database.query(is_held, t.lineage.run_id, version, t.config)
            stopping = held and (t.stop.wait(POLL_S) or t.lineage.is_stopping())
        held, stopping = t.world.share((held, stopping))
    if t.lineage:
        t.lineage.record("wait_for_evaluation", start, time.time(), version=version)
    return not stopping


def is_held(conn: Connection, run_id: str, version: int, config: RunConfig) -> bool:
    """Whether what the run serves is to be evaluated, is not yet, and would make way for `version`."""
    evaluation, run = config.evaluation, runs.get(conn, run_id)
    evaluated = config.agent is not None and (evaluation.tasks is not None or evaluation.unseen_tasks is not None)
    if not evaluated or version == run.current_version:
        return False
    served = runs.version(conn, run_id, run.current_version)
    if served is None or served.state == VersionState.ROLLED_BACK:
        return False
    due = run.published_step in schedule(evaluation.every, run.target_steps)
    return due and not evaluations.is_complete(conn, run_id, run.current_version)
