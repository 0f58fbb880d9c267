"""Where the samples of a run went: each trajectory, and each training session that has none, is in one band.

sampled ─┬─ trained
         ├─ waiting             ready, or leased by a step
         ├─ stale: REASON       too_old, tied
         ├─ rejected: REASON    no_reward, no_trainable_tokens, what the agent said, …
         ├─ open                sessions that have not ended, or whose trajectories are not built yet
         └─ without calls       ended sessions that made no call: completed, failed or abandoned
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, exists, func, select

from agentrl.domain.schemas import Json, TrajectoryState
from agentrl.store.tables import sessions, trajectories

WAITING = (TrajectoryState.READY, TrajectoryState.LEASED)


def of_run(conn: Connection, run_id: str) -> Json:
    """`samples` in all, and the `bands`: `band`, `reason` (or null), `samples`, and `tokens` that could be trained.

    Evaluations are not counted.
    """
    bands = [*_of_trajectories(conn, run_id), *_of_sessions(conn, run_id)]
    return {"samples": sum(band["samples"] for band in bands), "bands": bands}


def _of_trajectories(conn: Connection, run_id: str) -> list[Json]:
    tokens = func.coalesce(func.sum(trajectories.c.trainable_tokens), 0)
    rows = conn.execute(
        select(trajectories.c.state, trajectories.c.reason, func.count(), tokens)
        .where(trajectories.c.run_id == run_id)
        .group_by(trajectories.c.state, trajectories.c.reason)
        .order_by(trajectories.c.state, trajectories.c.reason)
    )
    found: dict[tuple[str, str | None], list[int]] = {}
    for state, reason, samples, trainable in rows:
        key = ("waiting", None) if state in WAITING else (str(state), reason)
        counts = found.setdefault(key, [0, 0])
        counts[0] += samples
        counts[1] += int(trainable)
    return [_band(*key, *counts) for key, counts in found.items()]


def _of_sessions(conn: Connection, run_id: str) -> list[Json]:
    training: list[Any] = [sessions.c.run_id == run_id, sessions.c.is_eval.is_(False)]
    going_on = conn.execute(select(func.count()).where(*training, sessions.c.built.is_(False))).scalar_one()
    without = (
        select(sessions.c.status, func.count())
        .where(*training, sessions.c.built.is_(True), ~exists().where(trajectories.c.session_id == sessions.c.id))
        .group_by(sessions.c.status)
        .order_by(sessions.c.status)
    )
    found = [_band("without calls", status, samples) for status, samples in conn.execute(without)]
    return [*([_band("open", None, going_on)] if going_on else []), *found]


def _band(band: str, reason: str | None, samples: int, tokens: int = 0) -> Json:
    return {"band": band, "reason": reason, "samples": int(samples), "tokens": tokens}
