"""The page of the pipeline: where the time of steps goes, what runs at the same time, and what bounds the run."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.dashboard import page_rendering
from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pictures import span_lanes, stacks
from agentrl.dashboard.pictures.stacks import Column
from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import run_cards
from agentrl.store.views.results import step_pipeline, step_time

ROWS = 20
"""Newest steps in the table."""
COLOURS = {
    "wait_for_batch": "waits",
    "read": "v5",
    "build": "v7",
    "forward": "v0",
    "backward": "v3",
    "update": "v2",
    "other": "v-none",
    "train": "v0",
    "write_version": "v6",
    "checkpoint": "v1",
    "wait_for_policy": "v4",
}
LANES = ("agents", "trainer", "checkpoints", "publish", "engines")
SPANS = {
    "calls": ("model calls", "v5"),
    "wait_for_batch": ("wait for a batch", "waits"),
    "wait_for_engines": ("wait for the engines' memory", "waits"),
    "wait_for_evaluation": ("wait for an evaluation", "waits"),
    "wait_for_publish": ("wait for the engines", "v4"),
    "train": ("train", "v0"),
    "train_step": ("train", "v0"),
    "save": ("write the version, save", "v6"),
    "checkpoint": ("write a checkpoint", "v1"),
    "publish": ("publish", "v2"),
    "stall": ("engines stand still", "failed"),
}
"""Kind of span → what people read, and its colour."""


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The pipeline of a run at this moment."""
    run = run_cards.one(conn, run_id)
    found = step_pipeline.of_run(conn, run_id)
    here = f"/ui/runs/{run['name']}/steps"
    rows = [row for row in found["steps"] if row["parts"]]
    names = [name for name in step_time.PARTS if any(name in row["parts"] for row in rows)]
    columns = [
        Column(
            f"step {row['step']}",
            {step_time.PARTS[name][0]: value for name, value in row["parts"].items()},
            f"{here}/{row['step']}",
        )
        for row in rows
    ]
    kinds = {step_time.PARTS[name][0]: COLOURS[name] for name in names}
    total = sum(found["means"].values())
    return {
        "title": "Pipeline",
        "active": "Pipeline",
        "run": run,
        "bound": found["bound"],
        "recent": min(len(rows), step_time.RECENT),
        "means": [
            {"name": step_time.PARTS[name][0], "stage": step_time.PARTS[name][1], "seconds": value}
            | {"share": value / total if total else 0.0, "kind": COLOURS[name]}
            for name, value in found["means"].items()
        ],
        "total": total,
        "stacks": stacks.drawn(
            stacks.joined(columns), kinds, f"The time of {len(rows)} steps by its parts", page_rendering.duration
        ),
        "joined": -(-len(columns) // stacks.MOST),
        "kinds": kinds,
        "lanes": span_lanes.drawn(found["spans"], LANES, SPANS, "What ran at the same time, over the newest steps"),
        "legend": {words: kind for kind_of, (words, kind) in SPANS.items() if _has(found["spans"], kind_of)},
        "names": [(name, step_time.PARTS[name][0]) for name in names],
        "rows": found["steps"][: -ROWS - 1 : -1],
        "whole": bool(names) and "train" in names,
    }


def _has(spans: list[Json], kind: str) -> bool:
    return any(span["kind"] == kind for span in spans)
