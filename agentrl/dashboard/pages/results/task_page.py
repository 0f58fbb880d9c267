"""The page of a task: its data, its groups over time, and two of them side by side."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pages.results import step_contents
from agentrl.dashboard.pictures import curves
from agentrl.dashboard.pictures.curves import Point
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter
from agentrl.store import Connection
from agentrl.store.views import run_cards
from agentrl.store.views.results import group_episodes, task_groups

ID_CHARACTERS = 32


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The task with its groups older than place `before` of the data; `left` and `right` are groups to compare."""
    task_id = params["task"]
    fits = len(task_id) == ID_CHARACTERS and task_id.isascii() and task_id.isalnum()
    task = task_groups.task(conn, run_id, task_id) if fits else None
    if task is None:
        raise RequestError(404, "the run has no such task", code="not_found")
    before = query.integer("before")
    rows = [step_contents.told(group) for group in task_groups.page(conn, task_id, before)]
    sides = _sides(conn, task_id, query)
    run = run_cards.one(conn, run_id)
    return {
        "title": "Task",
        "active": "Tasks",
        "run": run,
        "task": task,
        "rows": rows,
        "more": rows[-1]["cursor"] if len(rows) == task_groups.PAGE else None,
        "sides": sides,
        "words": group_episodes.last_words(conn, [one["id"] for side in sides for one in side["episodes"]]),
        "curve": curves.drawn({"returns": _points(rows, f"/ui/runs/{run['name']}")}, "Mean return of its groups"),
    }


def _sides(conn: Connection, task_id: str, query: Query) -> list[Json]:
    """The two groups to compare. Raises RequestError 400 for one that is not of the task."""
    asked = [(name, value) for name in ("left", "right") if (value := query.text(name)) is not None]
    found = {
        group["id"]: step_contents.told(group) for group in task_groups.chosen(conn, task_id, [v for _, v in asked])
    }
    for name, value in asked:
        if value not in found:
            raise bad_parameter(name, f"{name}: the task has no such group")
    return [found[value] for _, value in asked]


def _points(rows: list[Json], here: str) -> list[Point]:
    """The mean returns of groups by their place, with the range of their episodes."""
    return [
        Point(
            row["cursor"],
            row["mean"],
            min(row["returns"]),
            max(row["returns"]),
            None if row["step"] is None else f"{here}/steps/{row['step']}",
            f"mean return {row['mean']:.3g} at place {row['cursor']}",
        )
        for row in reversed(rows)
        if row["returns"] and row["cursor"] is not None
    ]
