"""Several runs side by side: what differs in their settings, their curves, their figures, and the tasks of all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.dashboard.page_request import Query, Runs
from agentrl.domain.schemas import Json
from agentrl.environment import masked
from agentrl.store import Connection
from agentrl.store.views import run_cards, run_figures, shared_tasks

MOST_SETTINGS, MOST_TASKS, MOST_CHOICES = 200, 50, 100
CHARTS = {
    "evaluation": "held-out reward, with its 95 % interval",
    "reward/mean": "training reward",
    "entropy": "entropy",
    "length/output_mean": "sampled tokens of a trajectory",
}
ABSENT = object()


def read(conn: Connection, chosen: Runs, params: Mapping[str, str], query: Query) -> Json:
    """The comparison of the chosen runs; with fewer than two, the runs to choose from."""
    cards = [run_cards.one(conn, run_id) for run_id in chosen.named]
    names = [card["name"] for card in cards]
    base = {"title": "Compare", "active": "Compare", "run": None, "cards": cards, "names": names}
    if len(cards) < 2:
        choices = run_cards.every(conn, chosen.bound_to)[:MOST_CHOICES]
        return base | {"choices": choices, "one_run": chosen.bound_to is not None}
    differing = differences([card["settings"] for card in cards])
    n_tasks, tasks = shared_tasks.of_runs(conn, chosen.named, MOST_TASKS)
    return base | {
        "choices": None,
        "settings": differing[:MOST_SETTINGS],
        "n_settings": len(differing),
        "figures": [run_figures.of_run(conn, run_id) for run_id in chosen.named],
        "series": " ".join(f"/ui/runs/{name}/series.json" for name in names),
        "charts": CHARTS,
        "tasks": tasks,
        "n_tasks": n_tasks,
    }


def differences(settings: Sequence[Json]) -> list[tuple[str, list[str | None]]]:
    """Dotted key → the value of each configuration as JSON (None: it has no such key), where they differ.

    Secrets are masked, so two secrets do not differ.
    """
    flat = [_flat(masked(one)) for one in settings]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key, ABSENT) for one in flat]) for key in keys]
    return [
        (key, [None if value is ABSENT else _said(value) for value in values])
        for key, values in rows
        if any(value != values[0] for value in values)
    ]


def _flat(settings: Json) -> dict[str, Any]:
    """Nested settings by dotted key; a list is one value."""
    found: dict[str, Any] = {}
    left: list[tuple[str, Any]] = [("", settings)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict) and (value or not name):
            left += [(f"{name}.{key}" if name else str(key), inner) for key, inner in value.items()]
        else:
            found[name] = value
    return found


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
