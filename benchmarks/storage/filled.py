"""Fills a store with the past of a long run: N trajectories, nearly all trained, the last ones ready for a lease."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from sqlalchemy import Connection, Table, text
from sqlalchemy.sql.schema import ScalarElementColumnDefault

from agentrl.store import Database, runs
from agentrl.store.db import bulk, codec
from agentrl.store.tables import (
    groups,
    interaction_data,
    interactions,
    rewards,
    sessions,
    step_trajectories,
    steps,
    trajectories,
    trajectory_interactions,
    weight_versions,
)

GROUP = 8  # sessions of a group, each one call and one trajectory
PER_STEP = 256  # trajectories
READY = 4 * PER_STEP
REJECTED_SHARE = 0.05
TABLES = (
    groups,
    sessions,
    interactions,
    interaction_data,
    rewards,
    trajectories,
    trajectory_interactions,
    step_trajectories,
)
CHUNK = 500  # groups


def fill(database: Database, n: int, *, prompt_tokens: int = 512, output_tokens: int = 256) -> str:
    """Insert a run of `n` trajectories; returns its id. Only ready trajectories have complete token arrays."""
    n_steps = (n - READY) // PER_STEP
    with database.write() as conn:
        run_id = runs.create(
            conn,
            name=f"filled-{n}",
            config={},
            task_data=[{"n": 0}],
            base_model="none",
            key="key",
            seed=0,
            steps=n_steps + 10,
        )
        step_ids = _past_steps(conn, run_id, n_steps)
        conn.execute(
            text("UPDATE runs SET published_step = :n, current_version = :n, trainer_epoch = 1 WHERE id = :id"),
            {"n": n_steps, "id": run_id},
        )
    maker = _Maker(run_id, n, n_steps, step_ids, prompt_tokens, output_tokens)
    for rows in maker.chunks():
        with database.write() as conn:
            for table in TABLES:
                _insert(conn, table, rows[table.name])
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(text("ANALYZE" if database.is_sqlite else "VACUUM ANALYZE"))
    return run_id


def _insert(conn: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows of equal keys; other columns get their defaults."""
    if not rows:
        return
    defaults = {c.name: c.default.arg for c in table.columns if isinstance(c.default, ScalarElementColumnDefault)}
    statement = bulk.insert(table, *(defaults | rows[0]))
    bulk.run(conn, statement, [defaults | row for row in rows])


def _past_steps(conn: Connection, run_id: str, n_steps: int) -> list[str]:
    now = time.time()
    ids = [codec.new_id() for _ in range(n_steps)]
    _insert(
        conn,
        weight_versions,
        [
            {
                "run_id": run_id,
                "version": i,
                "parent_version": i - 1,
                "step": i,
                "path": "w",
                "checksum": "c",
                "state": "published",
                "created_at": now,
                "published_at": now,
            }
            for i in range(1, n_steps + 1)
        ],
    )
    _insert(
        conn,
        steps,
        [
            {
                "id": ids[i],
                "run_id": run_id,
                "epoch": 1,
                "step": i + 1,
                "state": "published",
                "version_before": i,
                "version_after": i + 1,
                "max_staleness": 1,
                "turn_discount": 1.0,
                "estimator": "grpo",
                "batch_digest": "d",
                "groups": PER_STEP // GROUP,
                "trajectories": PER_STEP,
                "tokens_trained": 65536,
                "wasted_tokens": 0,
                "staleness_max": 1,
                "return_mean": 0.5,
                "metrics": codec.json_text({"loss": 0.1, "grad_norm": 1.0, "reward/mean": 0.5, "time/train": 3.0}),
                "started_at": now,
                "trained_at": now,
                "published_at": now,
            }
            for i in range(n_steps)
        ],
    )
    return ids


class _Past:
    """Ids and times of a run that began a month ago, at two ids per second."""

    def __init__(self) -> None:
        self.now = time.time() - 30 * 86400

    def new_id(self) -> str:
        """The next id, in order."""
        self.now += 0.5
        return codec.first_id(self.now) + os.urandom(8).hex()


class _Maker:
    """Makes the rows of groups, in order, in chunks."""

    def __init__(self, run_id: str, n: int, n_steps: int, step_ids: list[str], prompt: int, output: int) -> None:
        self.run_id, self.n, self.n_steps, self.step_ids = run_id, n, n_steps, step_ids
        rng = np.random.default_rng(0)
        self.full = [
            (
                codec.pack_ids(rng.integers(0, 32000, prompt).astype(np.int32)),
                codec.pack_ids(rng.integers(0, 32000, output).astype(np.int32)),
                codec.pack_logprobs(-rng.exponential(1.0, output).astype(np.float32)),
            )
            for _ in range(64)
        ]
        self.prompt, self.output = prompt, output
        self.short = (codec.pack_ids([1, 2]), codec.pack_ids([3]), codec.pack_logprobs([-0.5]))
        self.text = codec.pack_json([{"role": "user", "content": "What is 12 plus 35?"}])
        self.rng = rng
        self.past = _Past()

    def chunks(self) -> Iterator[dict[str, list[dict[str, Any]]]]:
        """The rows of the trained groups, a few rejected ones among them, then those of the ready groups."""
        todo = [("trained", step) for step in range(self.n_steps) for _ in range(PER_STEP // GROUP)]
        todo += [("ready", self.n_steps)] * (READY // GROUP)
        todo += [("rejected", self.n_steps)] * int((self.n / GROUP) * REJECTED_SHARE)
        for start in range(0, len(todo), CHUNK):
            rows: dict[str, list[dict[str, Any]]] = {table.name: [] for table in TABLES}
            for state, step in todo[start : start + CHUNK]:
                self._group(rows, state, step)
            yield rows

    def _group(self, rows: dict[str, list[dict[str, Any]]], state: str, step: int) -> None:
        group_id, now = self.past.new_id(), self.past.now
        rows["groups"].append(
            {
                "id": group_id,
                "run_id": self.run_id,
                "task_id": None,
                "cursor": None,
                "task": None,
                "size": GROUP,
                "is_eval": False,
                "external": False,
                "state": state,
                "sampling": None,
                "owner": "w",
                "start_digest": None,
                "created_at": now,
                "finished_at": now,
            }
        )
        for i in range(GROUP):
            self._session(rows, state, step, group_id, i, now)

    def _session(
        self, rows: dict[str, list[dict[str, Any]]], state: str, step: int, group_id: str, index: int, now: float
    ) -> None:
        sid, cid, tid = self.past.new_id(), self.past.new_id(), self.past.new_id()
        version = max(0, step - 1)
        whole = state == "ready"
        delta, output, logprobs = self.full[int(self.rng.integers(64))] if whole else self.short
        n_prompt, n_output = (self.prompt, self.output) if whole else (2, 1)
        step_id = self.step_ids[step] if state == "trained" else None
        rows["sessions"].append(
            {
                "id": sid,
                "run_id": self.run_id,
                "group_id": group_id,
                "sample_index": index,
                "key_hash": sid,
                "status": "completed",
                "seq": 1,
                "is_eval": False,
                "built": True,
                "trajectories": 1,
                "metadata": "{}",
                "error": None,
                "parent_session_id": None,
                "created_at": now,
                "last_seen_at": now,
                "due_at": now,
                "ended_at": now,
            }
        )
        rows["interactions"].append(
            {
                "id": cid,
                "run_id": self.run_id,
                "session_id": sid,
                "parent_id": None,
                "seq": 1,
                "dialect": "openai.chat",
                "status": "complete",
                "role": "main",
                "digest": cid,
                "replica": "p",
                "engine_url": "e",
                "params": "{}",
                "temperature": 1.0,
                "tools_hash": None,
                "conversation_key": cid,
                "fork_reason": None,
                "bridged": False,
                "distribution_modified": False,
                "kv_mixed": False,
                "trainable": True,
                "prompt_tokens": n_prompt,
                "prompt_digest": "d",
                "output_tokens": n_output,
                "cached_tokens": 0,
                "min_version": version,
                "max_version": version,
                "finish_reason": "stop",
                "error": None,
                "created_at": now,
                "first_token_at": now,
                "finished_at": now,
            }
        )
        rows["interaction_data"].append(
            {
                "interaction_id": cid,
                "new_messages": self.text,
                "answer": self.text,
                "prompt_delta_ids": delta,
                "output_ids": output,
                "logprobs": logprobs,
                "spans": codec.json_text([[version, 0, n_output]]),
            }
        )
        rows["rewards"].append(
            {
                "id": self.past.new_id(),
                "run_id": self.run_id,
                "session_id": sid,
                "interaction_id": None,
                "scope": "session",
                "name": "reward",
                "value": 0.5,
                "source": "agent",
                "idempotency_key": None,
                "applied": True,
                "created_at": now,
            }
        )
        rows["trajectories"].append(
            {
                "id": tid,
                "run_id": self.run_id,
                "group_id": group_id,
                "session_id": sid,
                "leaf_id": cid,
                "tokens": n_prompt + n_output,
                "trainable_tokens": n_output,
                "min_version": version,
                "max_version": version,
                "return": 0.5,
                "state": state,
                "reason": None,
                "lease_epoch": 1 if step_id else None,
                "lease_step_id": step_id,
                "created_at": now,
            }
        )
        rows["trajectory_interactions"].append(
            {"trajectory_id": tid, "position": 0, "interaction_id": cid, "owned": True}
        )
        if step_id is not None:
            rows["step_trajectories"].append(
                {
                    "step_id": step_id,
                    "trajectory_id": tid,
                    "advantage": 0.1,
                    "staleness_max": 1,
                    "staleness_mean": 1.0,
                    "tokens_trained": n_output,
                }
            )
