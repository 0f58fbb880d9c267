"""The figures of a run as a whole, for a comparison with others."""

from __future__ import annotations

from statistics import fmean

from sqlalchemy import Connection, func, select

from agentrl.domain.schemas import TRAINED, Json
from agentrl.store import evaluation_episodes, runs
from agentrl.store.tables import steps

RECENT = 10
"""Steps whose mean reward counts."""


def of_run(conn: Connection, run_id: str) -> Json:
    """Totals of the trained steps, the mean reward of the last ones, and the newest complete evaluation."""
    s = steps.c
    trained = (s.run_id == run_id, s.state.in_(TRAINED))
    totals = conn.execute(
        select(
            func.count().label("steps"),
            func.sum(s.tokens_trained).label("tokens_trained"),
            func.sum(s.wasted_tokens).label("wasted_tokens"),
            func.sum(s.trajectories).label("trajectories"),
            func.max(s.staleness_max).label("staleness_max"),
            func.max(s.trained_at).label("trained_at"),
        ).where(*trained)
    ).one()
    means = conn.execute(select(s.return_mean).where(*trained).order_by(s.step.desc()).limit(RECENT)).scalars()
    known = [mean for mean in means if mean is not None]
    complete = [one.as_json() for one in evaluation_episodes.newest(conn, runs.get(conn, run_id)) if one.complete]
    settings = list(complete[-1]["settings"].values()) if complete else []
    return dict(totals._mapping) | {
        "reward": fmean(known) if known else None,
        "held_out": settings[0] if settings else None,
        "held_out_step": complete[-1]["step"] if complete else None,
    }
