"""The evaluations of a run: means with intervals by step, and the episodes of one beside those of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.dashboard import run_memory
from agentrl.dashboard.page_rendering import query as address
from agentrl.dashboard.page_request import Query
from agentrl.dashboard.pages.results import evaluation_changes
from agentrl.dashboard.pictures import curves
from agentrl.dashboard.pictures.curves import Point
from agentrl.domain import evaluation
from agentrl.domain.evaluation import Evaluation
from agentrl.domain.schemas import Json
from agentrl.errors import bad_parameter
from agentrl.store import Connection, evaluation_episodes
from agentrl.store.views import run_cards
from agentrl.store.views.results import evaluation_rows

SHOWN, MOST_PICTURES = 200, 24


def read(conn: Connection, run_id: str, params: Mapping[str, str], query: Query) -> Json:
    """Every evaluation; with `version`, its episodes beside those of version `against` (default: the first one)."""
    run = run_cards.one(conn, run_id)
    told = run_memory.evaluations(conn, run_id)
    here = f"/ui/runs/{run['name']}/evaluations"
    version, against = query.integer("version"), query.integer("against")
    known = [one["version"] for one in told]
    for name, value in (("version", version), ("against", against)):
        if value is not None and value not in known:
            raise bad_parameter(name, f"{name}: no evaluation of version {value}")
    return {
        "title": "Evaluations",
        "active": "Evaluations",
        "run": run,
        "evaluations": told[: -SHOWN - 1 : -1],
        "pictures": _pictures(told, here),
        "versions": [(one["version"], one["step"]) for one in told],
        **_compared(conn, run_id, known, version, against),
    }


def _compared(conn: Connection, run_id: str, known: Sequence[int], version: int | None, against: int | None) -> Json:
    """The chosen evaluation beside another one."""
    if version is None:
        return {"version": None, "against": None, "changes": [], "n_changes": 0, "gains": {}}
    first = known[0] if against is None else against
    now, before = (evaluation_rows.of_version(conn, run_id, one) for one in (version, first))
    changes = evaluation_changes.of(now, [] if first == version else before)
    return {
        "version": version,
        "against": first,
        "changes": changes[:SHOWN],
        "n_changes": len(changes),
        "gains": {} if first == version else evaluation.gains(*(_whole(conn, run_id, one) for one in (first, version))),
    }


def _whole(conn: Connection, run_id: str, version: int) -> Evaluation:
    return evaluation.collect(evaluation_episodes.episodes(conn, run_id, version=version))[0]


def _pictures(found: Sequence[Json], here: str) -> list[Json]:
    """A picture for each setting, and for each of its sources: mean and interval over steps."""
    series: dict[str, list[Point]] = {}
    for one in found:
        href = address(here, {"version": one["version"]})
        for setting, figures in one["settings"].items():
            for name, of in (
                (setting, figures),
                *((f"{setting}: {k}", v) for k, v in figures.get("sources", {}).items()),
            ):
                if of["reward"] is not None:
                    said = f"step {one['step']}: {evaluation.figure(of)}"
                    series.setdefault(name, []).append(
                        Point(one["step"], of["reward"], of["low"], of["high"], href, said)
                    )
    return [
        {"name": name, "drawn": curves.drawn({name: points}, f"Held-out reward, {name}, over steps")}
        for name, points in sorted(series.items())[:MOST_PICTURES]
    ]
