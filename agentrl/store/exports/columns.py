"""The columns of each kind of exported row, by name and type."""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Table

from agentrl.store.tables import interactions, rewards, steps

Kind = Literal["text", "int", "float", "bool", "json", "ids", "floats", "doubles", "bools"]
"""`ids`: list of int32; `floats`: of float32; `doubles`: of float64; `bools`: of bool; `json`: any JSON value (text in
Parquet)."""
Columns = dict[str, Kind]
Row = dict[str, Any]


def of_table(table: Table) -> Columns:
    """The columns of a table without packed arrays."""
    kinds: list[tuple[type[Any], Kind]] = [
        (sa.JSON, "json"),
        (sa.Boolean, "bool"),
        (sa.Integer, "int"),
        (sa.Float, "float"),
        (sa.String, "text"),
    ]
    return {
        str(column.name): next(kind for sql_type, kind in kinds if isinstance(column.type, sql_type))
        for column in table.columns
    }


ARRAYS: Columns = {
    "input_ids": "ids",
    "loss_mask": "bools",
    "logprobs": "floats",
    "versions": "ids",
    "turn_ids": "ids",
    "temperatures": "floats",
    "turn_returns": "doubles",
}
"""The arrays of a trajectory, per token or per call."""

TRAJECTORY: Columns = {
    "trajectory_id": "text",
    "session_id": "text",
    "episode_id": "text",
    "group_id": "text",
    "task_id": "text",
    "task": "json",
    "sample_index": "int",
    "state": "text",
    "reason": "text",
    "step": "int",
    "min_version": "int",
    "max_version": "int",
    "tokens": "int",
    "trainable_tokens": "int",
    **ARRAYS,
    "return": "float",
    "advantage": "float",
    "staleness_max": "int",
    "staleness_mean": "float",
    "tokens_trained": "int",
    "created_at": "float",
}

COLUMNS: dict[str, Columns] = {
    "trajectories": TRAJECTORY,
    "interactions": of_table(interactions)
    | {
        "system": "json",
        "tools": "json",
        "new_messages": "json",
        "answer": "json",
        "prompt_delta_ids": "ids",
        "output_ids": "ids",
        "logprobs": "floats",
        "spans": "json",
    },
    "rewards": of_table(rewards),
    "steps": of_table(steps),
}
