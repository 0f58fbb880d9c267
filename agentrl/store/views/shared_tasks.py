"""Tasks that several runs have answered, with the mean return of each run. A task is the same if its data is the same.

the run with the fewest groups ─► its newest tasks ─► the same data in each other run ─► returns of their groups
                                                      at the same position, else anywhere
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from sqlalchemy import Connection, Text, cast, func, select

from agentrl.domain.schemas import Json
from agentrl.store.tables import groups, runs, sessions, tasks, trajectories

LOOKED_AT = 500
"""Tasks of all runs together whose returns are read."""
MOST_TASKS = 20_000
"""Tasks of a run that are read to find the same data at another position."""
LONGEST = 20_000
"""Characters of a task's data; longer ones are not compared."""
AT_ONCE = 400
_DATA = cast(tasks.c.data, Text)  # compared, not decoded


def of_runs(conn: Connection, run_ids: Sequence[str], most: int = 50) -> tuple[int, list[Json]]:
    """How many tasks of the newest ones all runs have answered; `most` of them, the largest difference first.

    Each has its `data` as text, `means` and `sessions` in the order of the runs, and the `difference` of the means.
    """
    rows = conn.execute(select(runs.c.id, runs.c.admitted).where(runs.c.id.in_(run_ids)))
    admitted = {row.id: row.admitted for row in rows}
    first = min(run_ids, key=lambda run_id: admitted[run_id])
    wanted = _newest(conn, first, LOOKED_AT // len(run_ids))
    same = {run_id: _same(conn, run_id, wanted) if run_id != first else _by_data(wanted) for run_id in run_ids}
    common = set.intersection(*(set(of_run) for of_run in same.values()))
    returns = {run_id: _returns(conn, [same[run_id][data] for data in common]) for run_id in run_ids}
    found: list[Json] = []
    for data in common:
        values = [returns[run_id].get(same[run_id][data], []) for run_id in run_ids]
        if all(values):
            means = [fmean(of_run) for of_run in values]
            counts = [len(of_run) for of_run in values]
            found.append({"data": data, "means": means, "sessions": counts, "difference": max(means) - min(means)})
    found.sort(key=lambda task: (-float(task["difference"]), str(task["data"])))
    return len(found), found[:most]


def _newest(conn: Connection, run_id: str, most: int) -> dict[str, tuple[int, str]]:
    """Task id → position and data, of the tasks of a run's newest groups."""
    newest = (
        select(groups.c.task_id)
        .where(groups.c.run_id == run_id, groups.c.cursor.is_not(None), groups.c.task_id.is_not(None))
        .order_by(groups.c.cursor.desc())
        .limit(most)
    )
    ids = list(dict.fromkeys(conn.execute(newest).scalars()))
    found: dict[str, tuple[int, str]] = {}
    for start in range(0, len(ids), AT_ONCE):
        query = select(tasks.c.id, tasks.c.position, _DATA).where(
            tasks.c.id.in_(ids[start : start + AT_ONCE]), func.length(_DATA) <= LONGEST
        )
        found |= {task_id: (position, data) for task_id, position, data in conn.execute(query)}
    return found


def _by_data(wanted: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    return {data: task_id for task_id, (_, data) in wanted.items()}


def _same(conn: Connection, run_id: str, wanted: Mapping[str, tuple[int, str]]) -> dict[str, str]:
    """Data → id of the task of another run with this data."""
    at = dict(wanted.values())
    positions, found = list(at), dict[str, str]()
    for start in range(0, len(positions), AT_ONCE):
        query = select(tasks.c.id, tasks.c.position, _DATA).where(
            tasks.c.run_id == run_id, tasks.c.position.in_(positions[start : start + AT_ONCE])
        )
        for task_id, position, data in conn.execute(query):
            if data == at[position]:
                found[data] = task_id
    missing = set(at.values()) - set(found)
    if missing:
        shorter = func.length(_DATA) <= LONGEST
        every = select(tasks.c.id, _DATA).where(tasks.c.run_id == run_id, shorter).order_by(tasks.c.position)
        for task_id, data in conn.execute(every.limit(MOST_TASKS)):
            if data in missing:
                found.setdefault(data, task_id)
    return found


def _returns(conn: Connection, task_ids: Sequence[str]) -> dict[str, list[float]]:
    """Task → the return of each of its training sessions that has one."""
    t = trajectories.c
    found: dict[str, list[float]] = defaultdict(list)
    for start in range(0, len(task_ids), AT_ONCE):
        query = (
            select(groups.c.task_id, func.max(t["return"]))
            .join(sessions, sessions.c.group_id == groups.c.id)
            .join(trajectories, t.session_id == sessions.c.id)
            .where(
                groups.c.task_id.in_(task_ids[start : start + AT_ONCE]),
                groups.c.is_eval.is_(False),
                t["return"].is_not(None),
                sessions.c.parent_session_id.is_(None),
                sessions.c.is_baseline.is_(False),
            )
            .group_by(groups.c.task_id, sessions.c.id)
        )
        for task_id, value in conn.execute(query):
            found[task_id].append(float(value))
    return found
