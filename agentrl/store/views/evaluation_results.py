"""The evaluations of a run. Complete ones do not change, so a process keeps them and reads later ones only."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

from agentrl.domain.schemas import Json
from agentrl.store import evaluation_episodes, runs


@dataclass(frozen=True, slots=True)
class Kept:
    """The results of the first evaluations of a run, all complete, while a trainer's epoch lasts.

    A trainer that starts again may roll back versions: then all are read anew.
    """

    epoch: int
    since: float = 0.0  # when the version of the last of them was made
    results: tuple[Json, ...] = ()


def read(conn: Connection, run_id: str, kept: Kept | None = None) -> tuple[list[Json], Kept]:
    """The evaluations by step (`domain.evaluation.Evaluation.as_json`), and what to pass at the next call."""
    epoch = int(runs.get(conn, run_id).trainer_epoch)
    if kept is None or kept.epoch != epoch:
        kept = Kept(epoch)
    known = {one["version"] for one in kept.results}
    found = [one.as_json() for one in evaluation_episodes.of_run(conn, run_id, kept.since)]
    later = [one for one in found if one["version"] not in known]
    n = next((i for i, one in enumerate(later) if not one["complete"]), len(later))
    if n:
        made = runs.version(conn, run_id, later[n - 1]["version"])
        assert made is not None
        kept = Kept(epoch, made.created_at, (*kept.results, *later[:n]))
    return [*kept.results, *later[n:]], kept
