"""The pipeline of a run: the parts of each step's time, and what ran at the same time as what, lately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Json
from agentrl.store.db import codec
from agentrl.store.tables import events, interactions
from agentrl.store.views import step_series
from agentrl.store.views.results import step_time

STEPS = 500
"""Newest steps that are read."""
SHOWN = 6
"""Newest steps whose overlap is shown."""
CALLS, EVENTS = 5000, 400
KINDS = {
    "wait_for_batch": "trainer",
    "wait_for_engines": "trainer",
    "train_step": "trainer",
    "wait_for_evaluation": "trainer",
    "wait_for_publish": "trainer",
    "checkpoint": "checkpoints",
    "publish": "publish",
}
"""Kind of event → the lane that shows it."""


def of_run(conn: Connection, run_id: str) -> Json:
    """`steps`: number, time, parts in seconds, the engines' longest stall; `means` over the newest ones; `bound`: the
    stage that bounds the run, its share, and what to change; `spans`: what ran when, over the newest steps.
    """
    series = step_series.of_run(conn, run_id, newest=STEPS)
    columns = {name: values for name, values in series["metrics"].items() if name.startswith("time/")}
    rows = [
        {"step": step, "at": at, "parts": step_time.parts({name: values[i] for name, values in columns.items()})}
        for i, (step, at) in enumerate(zip(series["step"], series["at"], strict=True))
    ]
    found = _events(conn, run_id)
    stalls = _stalls(found, series)
    measured = [row["parts"] for row in rows]
    bound = step_time.bound(measured)
    return {
        "steps": [row | {"stall_s": stalls.get(row["step"])} for row in rows],
        "means": step_time.means(measured[-step_time.RECENT :]),
        "bound": None if bound is None else {"stage": bound.stage, "share": bound.share, "text": bound.text},
        "spans": _spans(conn, run_id, found),
    }


def _events(conn: Connection, run_id: str) -> list[Json]:
    """The newest events of the pipeline with a valid start and end, oldest first."""
    rows = conn.execute(
        select(events.c.kind, events.c.data)
        .where(events.c.run_id == run_id, events.c.kind.in_(KINDS))
        .order_by(events.c.id.desc())
        .limit(EVENTS)
    ).all()
    found = [{"kind": row.kind, **row.data} for row in rows[::-1] if _is_span(row.data)]
    return sorted(found, key=lambda one: float(one["start"]))


def _is_span(data: Any) -> bool:
    start, end = (data.get("start"), data.get("end")) if isinstance(data, dict) else (None, None)
    return isinstance(start, (int, float)) and isinstance(end, (int, float)) and 0 <= start <= end


def _stalls(found: Sequence[Json], series: Json) -> dict[int, float]:
    """Step → how long the slowest engine stood still when its version was published."""
    step_of = {one.get("version"): one.get("step") for one in found if one["kind"] == "train_step"}
    known = set(series["step"])
    stalls: dict[int, float] = {}
    for one in found:
        values = step_time.stalls(one) if one["kind"] == "publish" else []
        step = step_of.get(one.get("version")) if isinstance(one.get("version"), int) else None
        if values and step is not None and step in known:
            stalls[int(step)] = max(values)
    return stalls


def _spans(conn: Connection, run_id: str, found: Sequence[Json]) -> list[Json]:
    """`{"lane", "kind", "start", "end"}` from the beginning of the newest SHOWN steps on, with calls as one lane."""
    trained = [one for one in found if one["kind"] == "train_step"][-SHOWN:]
    if not trained:
        return []
    waits = [one for one in found if one["kind"] == "wait_for_batch" and one.get("step") == trained[0].get("step")]
    since = min(float(one["start"]) for one in [trained[0], *waits])
    until = max(float(one["end"]) for one in found)
    spans = [span for one in found if float(one["end"]) > since for span in _of_event(one)]
    return [*_calls(conn, run_id, since, until), *spans]


def _of_event(one: Json) -> list[Json]:
    kind, start, end = one["kind"], float(one["start"]), float(one["end"])
    about = {name: one[name] for name in ("step", "version") if isinstance(one.get(name), int)}
    span = {"lane": KINDS[kind], "kind": kind, "start": start, "end": end, **about}
    updated = one.get("updated")
    if kind == "train_step" and isinstance(updated, (int, float)) and start <= updated <= end:
        return [span | {"kind": "train", "end": updated}, span | {"kind": "save", "start": updated}]
    if kind == "publish" and (values := step_time.stalls(one)):
        stalled = {"lane": "engines", "kind": "stall", "start": max(start, end - max(values)), "end": end, **about}
        return [span, stalled]
    return [span]


def _calls(conn: Connection, run_id: str, since: float, until: float) -> list[Json]:
    """When at least one model call ran, from the newest CALLS calls that began after `since`."""
    c = interactions.c
    rows = conn.execute(
        select(c.created_at, c.finished_at)
        .where(c.run_id == run_id, c.id >= codec.first_id(since), c.created_at <= until)
        .order_by(c.id.desc())
        .limit(CALLS)
    ).all()
    merged: list[list[float]] = []
    for start, end in sorted((row.created_at, row.finished_at or until) for row in rows):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], min(end, until))
        else:
            merged.append([start, max(start, min(end, until))])
    return [{"lane": "agents", "kind": "calls", "start": start, "end": end} for start, end in merged]
