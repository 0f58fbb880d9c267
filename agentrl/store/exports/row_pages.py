"""Reads the rows of a run in pages, in the order of their ids: constant memory, short transactions.

Each page is one snapshot. Rows inserted while an export runs are included; rows of an earlier page that change are
exported as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import ColumnElement, Connection, Select, and_, exists, func, select

from agentrl.domain.schemas import TrajectoryTokens
from agentrl.domain.selection import Selection
from agentrl.store.calls.shared_contents import load_contents
from agentrl.store.db import codec
from agentrl.store.db.database import Database
from agentrl.store.exports import token_rows
from agentrl.store.exports.columns import Row
from agentrl.store.exports.step_batches import by_step
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    rewards,
    sessions,
    step_trajectories,
    steps,
    tasks,
    trajectories,
    trajectory_interactions,
)

PAGE_ROWS = 256
PAGE_TOKENS = 500_000
"""Maximum tokens of a page, unless a single row has more."""
Page = list[Row]
T = TypeVar("T")


def count(conn: Connection, run_id: str, selection: Selection) -> int:
    """How many rows a selection has."""
    table = _TABLES[selection.what]
    return int(conn.execute(select(func.count()).select_from(table).where(*where(run_id, selection))).scalar_one())


def extent(conn: Connection, run_id: str, selection: Selection) -> tuple[int, int]:
    """How many trajectories a selection has, and the length of the longest in tokens."""
    found = conn.execute(
        select(func.count(), func.coalesce(func.max(trajectories.c.tokens), 0)).where(*where(run_id, selection))
    ).one()
    return int(found[0]), int(found[1])


def pages(database: Database, run_id: str, selection: Selection) -> Iterator[Page]:
    """Every selected row, in pages; their columns are `columns.COLUMNS[selection.what]`."""
    return _walk(database, _READERS[selection.what], run_id, selection)


def trajectory_pages(
    database: Database, run_id: str, selection: Selection
) -> Iterator[list[tuple[Row, TrajectoryTokens]]]:
    """Selected trajectories, in pages, each with its arrays as the loss takes them."""
    return _walk(database, _trajectories, run_id, selection)


def _walk(
    database: Database,
    read: Callable[[Connection, str, Selection, str], tuple[list[T], str]],
    run_id: str,
    selection: Selection,
) -> Iterator[list[T]]:
    page, after = database.query(read, run_id, selection, "")
    while page:
        yield page
        page, after = database.query(read, run_id, selection, after)


def tokens_row(tokens: TrajectoryTokens) -> Row:
    """The columns with a trajectory's arrays and credit."""
    return {
        "trajectory_id": tokens.trajectory_id,
        "session_id": tokens.session_id,
        "episode_id": tokens.episode_id,
        "group_id": tokens.group_id,
        "input_ids": tokens.input_ids,
        "loss_mask": tokens.loss_mask,
        "logprobs": tokens.logprobs,
        "versions": tokens.versions,
        "turn_ids": tokens.turn_ids,
        "temperatures": tokens.temperatures,
        "turn_returns": tokens.turn_returns,
        "return": tokens.episode_return,
    }


_TABLES = {
    "trajectories": trajectories,
    "tokens": trajectories,
    "interactions": interactions,
    "rewards": rewards,
    "steps": steps,
}


def where(run_id: str, selection: Selection) -> list[ColumnElement[bool]]:
    """The conditions of a selection on the table of its rows."""
    table = _TABLES[selection.what]
    conditions: list[ColumnElement[bool]] = [table.c.run_id == run_id]
    if selection.states:
        conditions.append((table.c.status if table is interactions else table.c.state).in_(selection.states))
    if selection.steps is None:
        return conditions
    chosen = [steps.c.run_id == run_id, steps.c.step >= selection.steps.first]
    if selection.steps.last is not None:
        chosen.append(steps.c.step <= selection.steps.last)
    if table is steps:
        return [*conditions, *chosen]
    leased = trajectories.c.lease_step_id.in_(select(steps.c.id).where(*chosen))
    if table is interactions:
        of_step = exists().where(
            trajectory_interactions.c.interaction_id == interactions.c.id,
            trajectories.c.id == trajectory_interactions.c.trajectory_id,
            leased,
        )
        return [*conditions, of_step]
    if table is rewards:
        return [*conditions, exists().where(trajectories.c.session_id == rewards.c.session_id, leased)]
    return [*conditions, leased]


def _next(statement: Select[Any], run_id: str, selection: Selection, after: str) -> Select[Any]:
    """The page that follows the row `after`."""
    key = _TABLES[selection.what].c.id
    return statement.where(*where(run_id, selection), key > after).order_by(key).limit(PAGE_ROWS)


def _plain(conn: Connection, run_id: str, selection: Selection, after: str) -> tuple[Page, str]:
    found = conn.execute(_next(select(_TABLES[selection.what]), run_id, selection, after))
    page = [dict(row._mapping) for row in found]
    return page, page[-1]["id"] if page else after


def _within_budget(found: Sequence[Any], tokens: Callable[[Any], int]) -> list[Any]:
    """The first rows with at most PAGE_TOKENS together, at least one."""
    total = 0
    for i, row in enumerate(found):
        total += tokens(row)
        if total > PAGE_TOKENS:
            return list(found[: max(1, i)])
    return list(found)


def _interactions(conn: Connection, run_id: str, selection: Selection, after: str) -> tuple[Page, str]:
    heads = conn.execute(_next(select(interactions), run_id, selection, after)).all()
    heads = _within_budget(heads, lambda row: row.prompt_tokens + row.output_tokens)
    data = {
        row.interaction_id: row
        for row in conn.execute(
            select(interaction_data).where(interaction_data.c.interaction_id.in_([row.id for row in heads]))
        )
    }
    hashes = {key for row in heads for key in (row.tools_hash, row.system_hash) if key is not None}
    shared = load_contents(conn, hashes)
    page = []
    for head in heads:
        row = dict(head._mapping) | {"tools": shared.get(head.tools_hash), "system": shared.get(head.system_hash)}
        if (packed := data.get(head.id)) is not None:
            row |= {
                "new_messages": codec.unpack_json(packed.new_messages),
                "answer": codec.unpack_json(packed.answer),
                "prompt_delta_ids": codec.unpack_ids(packed.prompt_delta_ids),
                "output_ids": codec.unpack_ids(packed.output_ids),
                "logprobs": codec.unpack_logprobs(packed.logprobs),
                "spans": packed.spans,
            }
        page.append(row)
    return page, heads[-1].id if heads else after


def _trajectories(
    conn: Connection, run_id: str, selection: Selection, after: str
) -> tuple[list[tuple[Row, TrajectoryTokens]], str]:
    statement = (
        select(
            trajectories,
            sessions.c.sample_index,
            groups.c.task_id,
            sa.case((groups.c.task_id.is_(None), groups.c.task), else_=tasks.c.data).label("task"),
            steps.c.step,
            steps.c.version_before,
            steps.c.max_staleness,
            steps.c.turn_discount,
            step_trajectories.c.advantage,
            step_trajectories.c.staleness_max,
            step_trajectories.c.staleness_mean,
            step_trajectories.c.tokens_trained,
        )
        .join(sessions, sessions.c.id == trajectories.c.session_id)
        .join(groups, groups.c.id == trajectories.c.group_id)
        .outerjoin(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(steps, steps.c.id == trajectories.c.lease_step_id)
        .outerjoin(
            step_trajectories,
            and_(
                step_trajectories.c.step_id == trajectories.c.lease_step_id,
                step_trajectories.c.trajectory_id == trajectories.c.id,
            ),
        )
    )
    found = conn.execute(_next(statement, run_id, selection, after)).all()
    heads = _within_budget(found, lambda row: row.tokens)
    tokens = _tokens(conn, run_id, heads)
    page = [(_trajectory_row(head, tokens[head.id]), tokens[head.id]) for head in heads]
    return page, heads[-1].id if heads else after


def _tokens(conn: Connection, run_id: str, heads: Sequence[Any]) -> dict[str, TrajectoryTokens]:
    """Arrays by trajectory: with its step's ages if leased or trained, else with every version young enough."""
    parts = by_step(conn, run_id, heads)
    return {tokens.trajectory_id: tokens for part in parts for tokens in part.load(conn)}


def _trajectory_row(head: Any, tokens: TrajectoryTokens) -> Row:
    names = (
        "task_id",
        "task",
        "sample_index",
        "state",
        "reason",
        "step",
        "min_version",
        "max_version",
        "tokens",
        "trainable_tokens",
        "advantage",
        "staleness_max",
        "staleness_mean",
        "tokens_trained",
        "created_at",
    )
    return {name: head._mapping[name] for name in names} | tokens_row(tokens)


def _token_rows(conn: Connection, run_id: str, selection: Selection, after: str) -> tuple[Page, str]:
    found = conn.execute(_next(select(trajectories.c.id, trajectories.c.tokens), run_id, selection, after)).all()
    ids = [row.id for row in _within_budget(found, lambda row: row.tokens)]
    return token_rows.read(conn, run_id, ids), ids[-1] if ids else after


def _trajectory_rows(conn: Connection, run_id: str, selection: Selection, after: str) -> tuple[Page, str]:
    page, after = _trajectories(conn, run_id, selection, after)
    return [row for row, _ in page], after


_READERS: dict[str, Callable[[Connection, str, Selection, str], tuple[Page, str]]] = {
    "trajectories": _trajectory_rows,
    "tokens": _token_rows,
    "interactions": _interactions,
    "rewards": _plain,
    "steps": _plain,
}
