"""A process's memory of the runs that are viewed, so that a page reads only new rows."""

from __future__ import annotations

from agentrl.domain.schemas import Json
from agentrl.store import Connection
from agentrl.store.views import evaluation_results
from agentrl.store.views.evaluation_results import Kept

MOST_RUNS = 64
_kept: dict[str, Kept] = {}


def evaluations(conn: Connection, run_id: str) -> list[Json]:
    """The evaluations of a run by step. Threads may call it at once: the last one to end is kept."""
    found, kept = evaluation_results.read(conn, run_id, _kept.get(run_id))
    while len(_kept) >= MOST_RUNS and run_id not in _kept:
        _kept.pop(next(iter(_kept)), None)
    _kept[run_id] = kept
    return found
