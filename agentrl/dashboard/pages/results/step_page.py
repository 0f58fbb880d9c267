"""The page of a step: its groups, its trajectories, where engine and trainer disagree, and another credit."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from typing import Any

from agentrl.dashboard import page_rendering
from agentrl.dashboard.page_request import MAX_INT32, Query
from agentrl.dashboard.pages.results import step_contents
from agentrl.dashboard.pictures import bars, histogram, swimlanes
from agentrl.domain.schemas import TRAINED, Json, StepState
from agentrl.errors import RequestError, bad_parameter
from agentrl.store import Connection, Row
from agentrl.store.training import returns
from agentrl.store.training.paths import scaled_rewards
from agentrl.store.views import run_cards
from agentrl.store.views.results import group_episodes, step_batch, step_doubts, step_rows

LANES = 64
SHOWN = 100
"""Trajectories in a table."""
ORDERS = ("mismatch", "advantage", "return", "staleness", "tokens")


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """The step of this number that survives; with `attempt`, one that was rolled back."""
    step, attempts = _step(conn, run_id, params["step"], query.text("attempt"))
    run = run_cards.one(conn, run_id)
    paths = step_batch.paths(conn, step)
    members = [step_contents.told(group) for group in step_batch.members(conn, step)]
    doubts, not_compared = step_doubts.of_step(conn, step)
    order = query.choice("order", *ORDERS) or ("mismatch" if doubts else "advantage")
    lanes = group_episodes.lanes(conn, [group["id"] for group in members], LANES)
    before, after = step_rows.beside(conn, run_id, step.step)
    metrics = {name: value for name, value in step.metrics.items() if isinstance(value, (int, float))}
    discount = _discount(query)
    return {
        "title": f"Step {step.step}",
        "active": "Steps",
        "run": run,
        "step": step,
        "attempts": attempts,
        "before": before,
        "after": after,
        "metrics": metrics,
        "ages": bars.drawn(
            [(f"{age} version{'' if age == 1 else 's'}", share) for age, share in step_contents.ages(metrics)],
            "Age",
            page_rendering.percent,
        ),
        "seconds": bars.drawn(step_contents.seconds(metrics), "Seconds", page_rendering.duration),
        "returns": histogram.drawn([value for group in members for value in group["returns"]], "Returns of episodes"),
        "advantages": histogram.drawn([path["advantage"] for path in paths], "Advantages of trajectories"),
        "groups": members,
        "earlier": step_batch.earlier(conn, step, members),
        "lanes": lanes,
        "n_episodes": sum(len(group["episodes"]) for group in members),
        "versions": _versions(lanes),
        "swimlanes": swimlanes.drawn(
            lanes, time.time(), until=max((one["ended_at"] or time.time() for one in lanes), default=None)
        ),
        "paths": _ordered(paths, {one.trajectory_id: one for one in doubts}, order)[:SHOWN],
        "n_paths": len(paths),
        "orders": ORDERS,
        "order": order,
        "measured": bool(doubts),
        "not_compared": not_compared,
        "command": f"agentrl replay --run {shlex.quote(run['name'])} --steps {step.step}",
        "can_replay": step.state in TRAINED,
        "discount": discount,
        "asked": f"{step.turn_discount if discount is None else discount:g}",
        "credit": None if discount is None else _credit(conn, step, paths, discount),
    }


def _step(conn: Connection, run_id: str, number: str, attempt: str | None) -> tuple[Row[Any], list[Row[Any]]]:
    """The step, and all attempts at it. Raises RequestError 404."""
    known = number.isascii() and number.isdigit() and int(number) <= MAX_INT32
    attempts = step_rows.attempts(conn, run_id, int(number)) if known else []
    chosen = [row for row in attempts if attempt in (None, row.id)]
    if not chosen:
        raise RequestError(
            404, f"the run has no step {number[:20]}" + (" of this attempt" if attempt else ""), code="not_found"
        )
    return chosen[0], attempts


def _discount(query: Query) -> float | None:
    value = query.number("discount")
    if value is not None and not 0 <= value <= 1:
        raise bad_parameter("discount", "discount: a number from 0 to 1")
    return value


def _versions(lanes: list[Json]) -> list[int]:
    """The weight versions of the calls in a picture."""
    return sorted({call["max_version"] for lane in lanes for call in lane["calls"] if call["max_version"] is not None})


def _ordered(paths: list[Json], doubts: Mapping[str, step_doubts.Doubt], order: str) -> list[Json]:
    """The trajectories with their doubt, the largest of `order` first; those without a value last."""
    told = [path | {"doubt": doubts.get(path["id"])} for path in paths]

    def value(path: Json) -> float | None:
        if order == "mismatch":
            return path["doubt"] and float(path["doubt"].mean)
        if order == "advantage":
            return None if path["advantage"] is None else abs(path["advantage"])
        found: float | None = path[
            {"return": "return_", "staleness": "staleness_max", "tokens": "tokens_trained"}[order]
        ]
        return found

    return sorted(told, key=lambda path: (value(path) is None, -(value(path) or 0.0), path["id"]))


def _credit(conn: Connection, step: Row[Any], paths: list[Json], discount: float) -> Json:
    """The trajectories under another turn discount, beside the recorded one; reads calls and rewards only.

    Rewards are scaled as the step scales them; those of a step that was rolled back are those that were recorded.
    """
    ids = sorted({path["session_id"] for path in paths})
    scaled = None if step.state == StepState.ROLLED_BACK else scaled_rewards.rescorer(conn, step)
    old, new = (returns.of_sessions(conn, ids, value, scaled) for value in (step.turn_discount, discount))
    rows = step_contents.recredited(paths, old, new)
    return {"rows": rows[:SHOWN], "all": len(rows), "flips": sum(row.flips for row in rows)}
