"""The steps of a run, newest first, a page at a time; one step, and the steps beside it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, select

from agentrl.domain.schemas import Json, StepState
from agentrl.store.tables import steps

PAGE = 50


def page(conn: Connection, run_id: str, before: str | None = None) -> list[Json]:
    """PAGE steps, rolled-back ones included: those that began before the step with the id `before`, if given."""
    query = select(steps).where(steps.c.run_id == run_id).order_by(steps.c.id.desc()).limit(PAGE)
    if before is not None:
        query = query.where(steps.c.id < before)
    return [dict(row._mapping) for row in conn.execute(query)]


def attempts(conn: Connection, run_id: str, step: int) -> list[Row[Any]]:
    """The attempts at a step: the surviving one first, then those that were rolled back, newest first."""
    rows = conn.execute(
        select(steps).where(steps.c.run_id == run_id, steps.c.step == step).order_by(steps.c.id.desc()).limit(PAGE)
    ).all()
    return sorted(rows, key=lambda row: bool(row.state == StepState.ROLLED_BACK))


def beside(conn: Connection, run_id: str, step: int) -> tuple[int | None, int | None]:
    """The surviving steps before and after a step."""
    surviving = select(steps.c.step).where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
    before = surviving.where(steps.c.step < step).order_by(steps.c.step.desc()).limit(1)
    after = surviving.where(steps.c.step > step).order_by(steps.c.step).limit(1)
    return conn.execute(before).scalar(), conn.execute(after).scalar()
