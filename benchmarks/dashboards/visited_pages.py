"""The addresses that the benchmark of pages opens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from sqlalchemy import select

from agentrl.store import Database
from agentrl.store.tables import runs, sessions, steps, tasks, trajectories


def pages_of(database: Database, n: int) -> dict[str, list[str]]:
    """`n` addresses of each page, spread over the newest run of the database."""
    with database.read() as conn:
        run = conn.execute(select(runs.c.id, runs.c.name).order_by(runs.c.created_at.desc()).limit(1)).one()
        step = conn.execute(select(steps.c.step).where(steps.c.run_id == run.id)).scalars().all()
        session = conn.execute(select(sessions.c.id).where(sessions.c.run_id == run.id)).scalars().all()
        trained = conn.execute(
            select(trajectories.c.session_id).where(trajectories.c.run_id == run.id).order_by(trajectories.c.id)
        ).scalars().all()  # fmt: skip
        task = conn.execute(select(tasks.c.id).where(tasks.c.run_id == run.id).limit(5000)).scalars().all()
    here = f"/ui/runs/{run.name}"
    bands = ("trained", "stale", "rejected", "waiting", "open", "without calls")
    return {
        "runs": ["/ui/"] * n,
        "run": [here] * n,
        "series": [f"{here}/series.json"] * n,
        "samples": [f"{here}/samples?band={band}" for band in islice(cycle(bands), n)],
        "steps": [f"{here}/steps"] * n,
        "step": [f"{here}/steps/{one}" for one in spread(sorted(set(step)), n)],
        "session": [f"/ui/sessions/{one}" for one in spread(session, n)],
        "tokens": [f"/ui/sessions/{one}/tokens.json" for one in spread(trained, n)],
        "tasks": [f"{here}/tasks"] * n,
        "task": [f"{here}/tasks/{one}" for one in spread(task, n)],
        "evaluations": [f"{here}/evaluations"] * n,
        "engines": [f"{here}/engines"] * n,
        "events": [f"{here}/events"] * n,
        "search": [f"{here}/search?reward_min=0.5"] * n,
        "search text": [f"{here}/search?text=wex{one}" for one in range(n)],
    }


def spread(values: Sequence[object], n: int) -> list[object]:
    """`n` of the values, evenly spread."""
    return [values[i * len(values) // n] for i in range(n)]
