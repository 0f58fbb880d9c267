"""Two runs with something to show on every page, and where they are served."""

from __future__ import annotations

import math
from dataclasses import dataclass

from browser import Served
from history import LIMITS, TOOLS, History, made_up_facts
from sqlalchemy import insert, select, update

from agentrl.domain.schemas import SessionStatus
from agentrl.store import events, heartbeats
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.tables import engines, groups, interactions, steps
from agentrl.store.training import token_facts


@dataclass(frozen=True)
class Site:
    """A served dashboard of two runs, `test` and `second`."""

    served: Served
    history: History
    session_id: str  # one that was trained
    task_id: str  # its task

    def address(self, of: str) -> str:
        """The URL of an address of `page_addresses`."""
        return f"{self.url}/ui{of.format(session=self.session_id, task=self.task_id)}"

    @property
    def url(self) -> str:
        return self.served.url


def fill(history: History) -> tuple[str, str]:
    """Something for every page; returns a session that was trained, and its task."""
    history.train(3)
    batch = history.batches[1]
    history.db.transact(token_facts.record, history.run_id, history.epoch, batch.step_id, made_up_facts(batch))
    history.group(tools=TOOLS)
    history.rejected(reward=False)
    history.evaluation({"source": "held-out"})
    with history.db.write() as conn:
        run_id = history.run_id
        new = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
        history.play(conn, new.session_ids[0], reward=False)
        broken = group_starts.start_group(conn, run_id, LIMITS, [codec.new_id() for _ in range(2)])
        for session_id in broken.session_ids:
            sealing.end(conn, session_id, SessionStatus.FAILED, "TimeoutError: the tool did not answer", LIMITS)
        for number, state in enumerate(("serving", "dead")):
            row = {"url": f"http://engine-{number}:3000", "state": state, "version": history.version - number}
            conn.execute(insert(engines).values(run_id=run_id, last_seen_at=0.0, **row))
        events.record(conn, run_id, "engine_died", {"url": "http://engine-1:3000"}, "proxy")
        heartbeats.beat(conn, run_id, "worker", "worker-1")
        for step in (1, 2, 3):
            metrics = {"reward/mean": 0.2 * step, "entropy": 1.0 / step, "length/output_mean": 40.0 + step, "loss": 0.1}
            metrics |= {"logprob_mismatch_mean_abs": 0.004, "importance_ratio/ess": 0.95, "drift": math.log(step)}
            metrics |= {f"time/{name}": 1.5 for name in ("train", "checkpoint", "wait_for_batch", "wait_for_policy")}
            metrics |= {f"time/{name}": 0.4 for name in ("read", "build", "forward", "backward", "update", "other")}
            for kind, start, end in (("train_step", 0.0, 3.0), ("checkpoint", 2.0, 5.0), ("publish", 3.0, 4.0)):
                times = {"start": 10.0 * step + start, "end": 10.0 * step + end, "updated": 10.0 * step + 2.0}
                events.record(conn, run_id, kind, {"step": step, "version": step, "stall_s": 0.4, **times}, "trainer")
            conn.execute(update(steps).where(steps.c.run_id == run_id, steps.c.step == step).values(metrics=metrics))
        fork = select(interactions.c.id).where(interactions.c.run_id == run_id).limit(3)
        conn.execute(update(interactions).where(interactions.c.id.in_(fork)).values(fork_reason="history_edited"))
        of_task = select(groups.c.task_id).where(groups.c.id == batch.trajectories[0].group_id)
        return batch.trajectories[0].session_id, conn.execute(of_task).scalar_one()
