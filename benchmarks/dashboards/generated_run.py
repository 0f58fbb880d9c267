"""Fills a database with a large run, as one that goes on: every fate of groups, sessions, calls and trajectories.

    python -m benchmarks.dashboards.generated_run --database-url sqlite:////tmp/big.db

    templates of episodes ─► sessions of planned groups ─► leases and steps ─► rows, some hundred groups a transaction

The rows follow from the seed; times count back from now. `agentrl.store.audit` finds no fault in them. The admin key
is `run_parts.ADMIN_KEY`. A PostgreSQL database must exist; it needs a superuser, who may skip the checks of foreign
keys.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from agentrl.cli.progress_bar import bar
from agentrl.domain.schemas import Json
from agentrl.store import Database, runs
from agentrl.store.db import codec
from agentrl.store.tables import metadata

from . import group_plans, run_parts, session_rows, table_writer, trained_steps
from .episode_templates import make, shared_contents
from .group_fates import Fates
from .group_plans import GROUP, GroupPlan, Shape
from .run_timeline import EPOCH, Ids, Timeline
from .session_rows import Rows

STEP_S = 108.0
"""Seconds of a step: 800 steps are a day."""
TEMPLATES = 2_000
PATHS_PER_SESSION = 1.12
"""Trajectories per training session, of those that fail too; calls per session are fewer than a template's."""
CALLS_KEPT = 0.965
CHUNK = 200  # groups
NAME = "generated"
CONFIG = {
    "name": NAME,
    "model": "tiny",
    "agent": "tool_agent",
    "steps": 1000,
    "rollout": {"group_size": GROUP, "min_group_size": group_plans.MIN_GROUP},
    "trainer": {"max_staleness": 4, "groups_per_step": 12},
}


@dataclass(slots=True)
class Generated:
    """What was made so far."""

    run_id: str
    shape: Shape
    timeline: Timeline
    rows: Rows
    steps: dict[int, trained_steps.StepTotals]
    task_ids: dict[int, Json]  # position → its row
    sources: list[Json]
    groups: int = 0  # of training
    sessions: list[str] = field(default_factory=list)  # some of them


def generate(
    database: Database,
    *,
    calls: int,
    trajectories: int,
    tasks: int = 10_000,
    seed: int = 0,
    now: float | None = None,
    progress: Callable[[int, int | None], None] = lambda done, total: None,
) -> str:
    """Insert a run with about so many calls and trajectories; returns its id."""
    with table_writer.unchecked(database):
        for done, total, tables in chunks(calls, trajectories, tasks, seed, time.time() if now is None else now):
            with database.write() as conn:
                for table in metadata.sorted_tables:
                    table_writer.write(conn, table, tables.pop(table.name, []))
            assert not tables, f"rows of unknown tables: {list(tables)}"
            progress(done, total)
    with database.read() as conn:
        run_id = str(runs.by_name(conn, NAME).id)
    return run_id


def chunks(
    calls: int, trajectories: int, tasks: int, seed: int, now: float
) -> Iterator[tuple[int, int, dict[str, list[Json]]]]:
    """(groups done, groups in all, rows by table) until all rows are made; each chunk's dict may be emptied."""
    shape = Shape.of(max(20, round(trajectories / PATHS_PER_SESSION / GROUP)))
    timeline = Timeline.until(now, shape.steps, STEP_S)
    plans = group_plans.plans(shape, timeline, seed)
    sessions = sum(1 if plan.evaluation else GROUP for plan in plans)
    templates = make(min(TEMPLATES, sessions), calls / sessions / CALLS_KEPT, seed)
    made = _begin(shape, timeline, tasks, seed)
    fates = Fates(seed, timeline, templates)
    for start in range(0, len(plans), CHUNK):
        for plan in plans[start : start + CHUNK]:
            _group(made, fates, plan, seed)
        yield min(start + CHUNK, len(plans)), len(plans), made.rows.tables
    _finish(made, seed)
    yield len(plans), len(plans), made.rows.tables


def _begin(shape: Shape, timeline: Timeline, tasks: int, seed: int) -> Generated:
    ids = Ids(seed)
    run_id = ids.at(timeline.start - 10)
    rows = Rows(run_id, ids, timeline, random.Random(f"{seed}/rows"))
    rows.tables["task_sources"], rows.tables["tasks"] = run_parts.tasks(run_id, tasks, ids, timeline.start - 5, seed)
    rows.tables["contents"] = [{"hash": one.hash, "body": one.body} for one in shared_contents()]
    steps = {
        number: trained_steps.StepTotals(ids.at(timeline.at(number)), number) for number in range(1, shape.steps + 2)
    }
    by_position = {row["position"]: row for row in rows.tables["tasks"]}
    return Generated(run_id, shape, timeline, rows, steps, by_position, rows.tables["task_sources"])


def _group(made: Generated, fates: Fates, plan: GroupPlan, seed: int) -> None:
    """Add one group with everything in it."""
    rows = made.rows
    group_id = rows.ids.at(plan.begin)
    task: Json | None = None
    if plan.evaluation is None:
        task = made.task_ids[run_parts.position_at(made.groups, made.sources, seed)]
    episodes = fates.evaluation(plan) if task is None else fates.training(plan, json.loads(task["data"]))
    paths = [path for index, one in enumerate(episodes) for path in session_rows.add(rows, group_id, index, one)]
    if made.groups % 50 == 0:
        made.sessions.append(rows.tables["sessions"][-1]["id"])
    rejected = plan.state == "rejected"
    for path in paths:
        if path.row["state"] == "ready" and rejected:
            reason = "group_too_small" if plan.reason is None else f"rejected: {plan.reason}"
            path.row |= {"state": "rejected", "reason": reason}
        elif path.row["state"] == "ready" and plan.state == "stale":
            path.row |= {"state": "stale", "reason": plan.reason}
    if plan.step is not None:
        step = made.steps[plan.step]
        trained = step.lease(paths, plan.state == "trained")
        rows.tables["step_trajectories"] += trained
        if plan.step % trained_steps.FACTS_EVERY == 0 or plan.step > made.shape.steps - trained_steps.FACTS_LAST:
            rng = np.random.default_rng(seed + plan.step)
            rows.tables["token_facts"] += [trained_steps.facts_row(row, rng) for row in trained]
    rows.tables["groups"].append(
        {
            "id": group_id,
            "run_id": made.run_id,
            "task_id": None if task is None else task["id"],
            "cursor": None if task is None else made.groups,
            "reject_reason": plan.reason if rejected else None,
            "task": codec.json_text({"prompt": episodes[0].prompt}) if task is None else None,
            "size": len(episodes),
            "name": None,
            "due_at": None,
            "missing": 0,
            "is_eval": task is None,
            "external": False,
            "state": plan.state,
            "sampling": None,
            "owner": f"worker-{made.groups % 3}",
            "start_digest": None,
            "created_at": plan.begin,
            "finished_at": None if plan.state == "running" else plan.end,
        }
    )
    made.groups += task is not None


def _finish(made: Generated, seed: int) -> None:
    """Add the run, its steps, versions, engines, events and keys."""
    rng, timeline, rows = random.Random(f"{seed}/steps"), made.timeline, made.rows
    shape = made.shape
    rows.tables["steps"] = [step.row(made.run_id, timeline, rng) for step in made.steps.values()]
    rows.tables["weight_versions"] = [
        trained_steps.version_row(made.run_id, number, timeline, rng) for number in range(shape.steps + 1)
    ]
    rows.tables |= run_parts.fleet(made.run_id, timeline)
    rows.tables["events"] = run_parts.events(made.run_id, timeline, made.sessions, rows.ids, rng)
    rows.tables["keys"] = [run_parts.key_row(made.run_id, rows.ids, timeline.start)]
    config = CONFIG | {"evaluation": {"every": group_plans.every(shape), "size": shape.evaluated_tasks}}
    rows.tables["runs"] = [
        {
            "id": made.run_id,
            "name": NAME,
            "config": codec.json_text(config),
            "base_model": "tiny",
            "status": "running",
            "error": None,
            "key_hash": codec.hash_key(run_parts.RUN_KEY),
            "seed": seed,
            "target_steps": 1000,
            "current_version": shape.steps,
            "published_step": shape.steps,
            "trainer_epoch": EPOCH,
            "data_cursor": made.groups,
            "admitted": made.groups,
            "returned": shape.stale + shape.rejected,
            "running": shape.running,
            "worker_asked_at": None,
            "outside_asked_at": None,
            "outside_had_last": False,
            "engines_gone": 1,
            "created_at": timeline.start - 10,
            "finished_at": None,
        }
    ]


def main() -> None:
    """Make the schema, and fill it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database-url", required=True, help="a SQLAlchemy URL")
    for name, default in (("calls", 1_000_000), ("trajectories", 100_000), ("tasks", 10_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    options = parser.parse_args()
    database = Database(options.database_url)
    database.upgrade()
    start = time.perf_counter()
    with bar("groups") as progress:
        run_id = generate(
            database,
            calls=options.calls,
            trajectories=options.trajectories,
            tasks=options.tasks,
            seed=options.seed,
            progress=progress,
        )
    database.close()
    print(f"run {run_id} in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
