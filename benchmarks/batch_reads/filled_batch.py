"""Records a run whose first batch is ready: groups that share a prompt, trajectories of three calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from recorded_calls import record_call
from sqlalchemy import text

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import SessionStatus
from agentrl.store import Connection, Database, runs
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import metadata
from agentrl.store.training import rewards

VOCABULARY = 49152
PARTS = ((4, 3), (1, 3), (1, 4))
"""Prompt and output of each call, in sixteenths of the trajectory."""


@dataclass(frozen=True, slots=True)
class Size:
    """A batch. `tokens` of each trajectory is a multiple of 16."""

    groups: int
    group_size: int
    tokens: int

    @property
    def total(self) -> int:
        """Tokens of all trajectories."""
        return self.groups * self.group_size * self.tokens


def config_of(size: Size, folder: str, **trainer: Any) -> RunConfig:
    """The run's configuration."""
    trainer = {"groups_per_step": size.groups, "tokens_per_microbatch": 4 * size.tokens} | trainer
    rollout = {"group_size": size.group_size}
    made = {"name": "batch", "model": "tiny", "agent": "a:b", "tasks": "t", "steps": 2, "runs_dir": folder}
    return RunConfig.model_validate(made | {"trainer": trainer, "rollout": rollout})


def fill(database: Database, size: Size, config: RunConfig, vocabulary: int = VOCABULARY) -> None:
    """Create the run and its groups. Those after the first PLAYED are copies of these, with ids of their own."""
    rng = np.random.default_rng(0)
    with database.write() as conn:
        run_id = runs.create(
            conn, name="batch", config={}, task_data=[{}], base_model="tiny", key="run-key", seed=0, steps=2
        )
    limits = Limits.of(config)
    for _ in range(min(PLAYED, size.groups)):
        with database.write() as conn:
            _group(conn, run_id, limits, size, vocabulary, rng)
    for copy in range(1, max(1, size.groups // PLAYED)):
        with database.write() as conn:
            _copy(conn, f"{copy:x}")


PLAYED = 64
COPIED = (
    "groups",
    "sessions",
    "interactions",
    "interaction_data",
    "trajectories",
    "trajectory_interactions",
    "rewards",
)
SHARED = ("run_id", "task_id")
"""Ids of what all copies belong to."""


def _copy(conn: Connection, begin: str) -> None:
    """Copy all rows of the groups that were played: their ids begin with 0, those of the copies with another digit."""
    for name in COPIED:
        columns = [column.name for column in metadata.tables[name].columns]
        ids = [c for c in columns if (c == "id" or c.endswith(("_id", "key_hash"))) and c not in SHARED]
        changed = {c: f"'{begin}' || substr(\"{c}\", 2)" for c in ids}
        changed["cursor"] = f'"cursor" + 1000 * {int(begin, 16)}'
        chosen = [changed.get(c, f'"{c}"') for c in columns]
        into, played = ", ".join(f'"{c}"' for c in columns), f"substr(\"{ids[0]}\", 1, 1) = '0'"
        conn.execute(text(f"INSERT INTO {name} ({into}) SELECT {', '.join(chosen)} FROM {name} WHERE {played}"))


def _group(
    conn: Connection, run_id: str, limits: Limits, size: Size, vocabulary: int, rng: np.random.Generator
) -> None:
    sixteenth = size.tokens // 16
    prompt = rng.integers(3, vocabulary, PARTS[0][0] * sixteenth, np.int32)
    new = group_starts.start_group(conn, run_id, limits, [codec.new_id() for _ in range(size.group_size)])
    for member, session_id in enumerate(new.session_ids):
        parent, before = None, np.empty(0, np.int32)
        for call, (asked, sampled) in enumerate(PARTS):
            delta = prompt if call == 0 else rng.integers(3, vocabulary, asked * sixteenth, np.int32)
            output = rng.integers(3, vocabulary, sampled * sixteenth, np.int32)
            parent = _call(conn, run_id, session_id, parent, before, delta, output, rng)
            before = np.concatenate([before, delta, output])
        rewards.add(conn, session_id, value=float(member), discount=1.0)
        sealing.end(conn, session_id, SessionStatus.COMPLETED, None, limits)


def _call(
    conn: Connection,
    run_id: str,
    session_id: str,
    parent: str | None,
    before: NDArray[np.int32],
    delta: NDArray[np.int32],
    output: NDArray[np.int32],
    rng: np.random.Generator,
) -> str:
    logprobs = np.log(rng.random(len(output), np.float32) + 1e-6)
    prompt = np.concatenate([before, delta])
    return record_call(
        conn, run_id, session_id, prompt=prompt, delta=delta, output=output, logprobs=logprobs, parent=parent
    )
