"""The columns of each kind of exported row, by name and type."""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy import Table

from agentrl.domain.schemas import FACTS
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

TOKENS: Columns = {
    "trajectory_id": "text",
    "session_id": "text",
    "group_id": "text",
    "state": "text",
    "reason": "text",
    "step": "int",
    "input_ids": "ids",
    "turn_ids": "ids",
    "logprobs": "floats",
    "versions": "ids",
    "ages": "ids",
    "loss_reasons": "json",
    "top_logprobs": "json",
    "expert_origins": "ids",
    **dict.fromkeys(FACTS, "floats"),
}
"""A trajectory token by token. `ages` is -1 where the token was not sampled, or its step's batch had no such version;
`loss_reasons` has (reason, start, end); `top_logprobs` has, for calls that recorded them, the likeliest tokens at each
place from `start` on (`likeliest_tokens`); `expert_origins` has the RouteOrigin of each token, null where no experts
were recorded. What the trainer did not measure is NaN (null in JSONL).
"""

COLUMNS: dict[str, Columns] = {
    "tokens": TOKENS,
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
