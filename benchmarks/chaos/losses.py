"""Checks a finished run without the store's own code: compares its rows, by plain SQL, with the agent's ledger.

The one exception is `codec.unpack_json`, which unpacks stored answers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from agentrl.store.db import codec
from chaos.agent import digest
from chaos.run import NAME, Run

KINDS = (
    "missing_responses",
    "changed_responses",
    "missing_rewards",
    "changed_rewards",
    "missing_trajectories",
    "trained_twice",
    "missing_steps",
    "two_trainers",
    "leftover_processes",
)
ENDING_S = 10.0
"""Seconds in which the processes of an ended run must disappear."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Losses by kind with a line for each, the violations that `agentrl store check` reports, and the counts of checked
    items.
    """

    losses: dict[str, int]
    details: list[str]
    violations: list[str]
    responses: int
    rewards: int
    trained: int

    @property
    def clean(self) -> bool:
        """Whether nothing was lost and no invariant is violated."""
        return not any(self.losses.values()) and not self.violations


def check(run: Run) -> Findings:
    """Compare a finished run with its ledger."""
    calls, rewards = read_ledger(run)
    with run.database.connect() as conn:
        run_id = conn.execute(text("SELECT id FROM runs WHERE name = :name"), {"name": NAME}).scalar_one()
        found = [
            *_responses(conn, run_id, calls),
            *_rewards(conn, run_id, rewards),
            *_finished_sessions(conn, run_id),
            *_trained_twice(conn, run_id),
            *_steps(conn, run_id, run.steps),
            *_two_trainers(conn, run_id),
        ]
        trained = conn.execute(
            text("SELECT count(*) FROM trajectories WHERE run_id = :run AND state = 'trained'"), {"run": run_id}
        ).scalar_one()
    found += [("leftover_processes", line) for line in _leftovers(run)]
    losses = {kind: sum(k == kind for k, _ in found) for kind in KINDS}
    details = [f"{kind}: {line}" for kind, line in found]
    return Findings(losses, details, store_check(run), len(calls), len(rewards), trained)


def read_ledger(run: Run) -> tuple[dict[str, str], dict[tuple[str, str], dict[str, Any]]]:
    """Call id → digest of its text, and (session, key) → acknowledged reward. An incomplete last line is ignored."""
    calls: dict[str, str] = {}
    rewards: dict[tuple[str, str], dict[str, Any]] = {}
    for line in run.ledger.read_text().split("\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["kind"] == "call":
            calls[entry["id"]] = entry["digest"]
        else:
            rewards[entry["session"], entry["key"]] = entry
    return calls, rewards


def store_check(run: Run) -> list[str]:
    """The violations that `agentrl store check` reports, one line each."""
    env = os.environ | {"AGENTRL_DATABASE_URL": run.database_url}
    argv = [sys.executable, "-m", "agentrl", "store", "check", "--run", NAME]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return done.stderr.strip().splitlines() or [f"agentrl store check ended with status {done.returncode}"]


Found = Iterator[tuple[str, str]]


def _responses(conn: Connection, run_id: str, calls: dict[str, str]) -> Found:
    rows = conn.execute(
        text(
            "SELECT i.id, d.answer FROM interactions i JOIN interaction_data d ON d.interaction_id = i.id "
            "WHERE i.run_id = :run AND i.status = 'complete'"
        ),
        {"run": run_id},
    )
    stored = {row.id: digest(codec.unpack_json(row.answer).get("content") or "") for row in rows}
    for call_id, expected in calls.items():
        if call_id not in stored:
            yield "missing_responses", f"call {call_id} was delivered and is not stored as complete"
        elif stored[call_id] != expected:
            yield "changed_responses", f"call {call_id} was delivered with another text"


def _rewards(conn: Connection, run_id: str, rewards: dict[tuple[str, str], dict[str, Any]]) -> Found:
    rows = conn.execute(
        text("SELECT session_id, idempotency_key, name, value FROM rewards WHERE run_id = :run"), {"run": run_id}
    )
    stored = {(row.session_id, row.idempotency_key): (row.name, row.value) for row in rows}
    for key, entry in rewards.items():
        if key not in stored:
            yield "missing_rewards", f"reward {key[1]} of session {key[0]} was acknowledged and is not stored"
        elif stored[key] != (entry["name"], entry["value"]):
            yield "changed_rewards", f"reward {key[1]} was {entry['value']} and is {stored[key][1]}"


def _finished_sessions(conn: Connection, run_id: str) -> Found:
    """Completed sessions, of groups that were not rejected, that have no reward or no trajectory."""
    completed = (
        "SELECT s.id FROM sessions s JOIN groups g ON g.id = s.group_id WHERE s.run_id = :run "
        "AND s.status = 'completed' AND NOT s.is_eval AND g.state <> 'rejected' "
    )
    reward = "AND NOT EXISTS (SELECT 1 FROM rewards r WHERE r.session_id = s.id AND r.interaction_id IS NULL)"
    for row in conn.execute(text(completed + reward), {"run": run_id}):
        yield "missing_rewards", f"session {row.id} is completed and its own reward is not stored"
    trajectory = "AND NOT EXISTS (SELECT 1 FROM trajectories t WHERE t.session_id = s.id)"
    for row in conn.execute(text(completed + trajectory), {"run": run_id}):
        yield "missing_trajectories", f"session {row.id} is completed and has no trajectory"


def _trained_twice(conn: Connection, run_id: str) -> Found:
    twice = (
        "SELECT {id} AS id, count(*) AS n FROM steps s JOIN step_trajectories st ON st.step_id = s.id {join}"
        "WHERE s.run_id = :run AND s.state <> 'rolled_back' {only} GROUP BY {id} HAVING count(*) > 1"
    )
    trajectories = twice.format(id="st.trajectory_id", join="", only="")
    for row in conn.execute(text(trajectories), {"run": run_id}):
        yield "trained_twice", f"trajectory {row.id} is in {row.n} surviving steps"
    join = "JOIN trajectory_interactions ti ON ti.trajectory_id = st.trajectory_id "
    outputs = twice.format(id="ti.interaction_id", join=join, only="AND ti.owned")
    for row in conn.execute(text(outputs), {"run": run_id}):
        yield "trained_twice", f"the output of call {row.id} was trained {row.n} times"


def _steps(conn: Connection, run_id: str, target: int) -> Found:
    run = conn.execute(text("SELECT status, published_step FROM runs WHERE id = :run"), {"run": run_id}).one()
    if (run.status, run.published_step) != ("finished", target):
        yield "missing_steps", f"the run is {run.status} at step {run.published_step} of {target}"
    states = "SELECT step, state FROM steps WHERE run_id = :run AND state <> 'rolled_back'"
    published = sorted(row.step for row in conn.execute(text(states), {"run": run_id}) if row.state == "published")
    for step in sorted(set(range(1, target + 1)) - set(published)):
        yield "missing_steps", f"step {step} is not published"


def _two_trainers(conn: Connection, run_id: str) -> Found:
    """Steps that a trainer began or trained after a later trainer of the run had begun one."""
    late = (
        "SELECT DISTINCT s.id, s.epoch FROM steps s JOIN steps later ON later.run_id = s.run_id "
        "AND later.epoch > s.epoch AND (later.started_at < s.started_at OR later.started_at < s.trained_at) "
        "WHERE s.run_id = :run"
    )
    for row in conn.execute(text(late), {"run": run_id}):
        yield "two_trainers", f"step {row.id} of trainer {row.epoch} was written while a later trainer wrote"


def _leftovers(run: Run) -> list[str]:
    until = time.monotonic() + ENDING_S
    while (left := run.leftovers()) and time.monotonic() < until:
        time.sleep(0.2)
    return [str(process) for process in left]
