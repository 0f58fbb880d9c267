"""Audits a run: checks its promises from its rows, and counts its calls.

Every violation is one line, `TABLE ID: what is wrong`. Groups are read a page at a time, so that memory does not grow
with the run; only steps and versions are kept. The checks are in `lineage_audit` (versions, steps, the run's position)
and `group_audit` (sessions, calls, tokens, rewards, trajectories, training).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Set

from sqlalchemy import Connection, and_, func, select

from agentrl.domain.schemas import InteractionStatus, Json, StepState
from agentrl.store import events, runs, sample_flow, task_rows
from agentrl.store.audit import group_audit, group_rows, lineage_audit
from agentrl.store.audit.lineage_audit import Lineage
from agentrl.store.audit.trajectory_checks import StepTotals
from agentrl.store.db import codec
from agentrl.store.sessions import task_skips
from agentrl.store.tables import (
    contents,
    groups,
    interactions,
    replays,
    sessions,
    skipped_tasks,
    step_trajectories,
    steps,
    tasks,
    token_facts,
    trajectories,
)

PAGE_GROUPS = 32
REMEMBERED_CONTENTS = 10_000
Progress = Callable[[int, int], None]
"""Called with (groups done, groups in all)."""


def scan(conn: Connection, run_id: str, progress: Progress = lambda done, total: None) -> Iterator[str]:
    """Every broken promise of a run, as it is found. While the run goes on, call this within one `Database.read`."""
    lineage = Lineage.read(conn, run_id)
    yield from lineage_audit.check(lineage)
    in_all = conn.execute(select(func.count()).select_from(groups).where(groups.c.run_id == run_id)).scalar_one()
    totals: dict[str, StepTotals] = {}
    states: Counter[str] = Counter()
    done, after = 0, ""
    checked: set[str] = set()
    while ids := _page(conn, run_id, after):
        named: set[str] = set()
        for rows in group_rows.load(conn, run_id, ids[0], ids[-1]):
            yield from group_audit.check(rows, lineage, totals)
            states[rows.group.state] += not rows.group.is_eval
            hashes = {key for call in rows.calls.values() for key in (call.tools_hash, call.system_hash)}
            named |= hashes - {None}
        yield from _contents(conn, named - checked)
        checked = named if len(checked) > REMEMBERED_CONTENTS else checked | named
        after, done = ids[-1], done + len(ids)
        progress(done, in_all)
    yield from _steps(lineage, totals)
    yield from _counters(lineage, states, task_skips.count(conn, run_id))
    yield from _foreign_rows(conn, run_id)
    yield from _token_facts(conn, run_id)
    yield from _samples(conn, run_id)
    yield from _task_sources(conn, run_id)
    yield from _skipped_tasks(conn, run_id, lineage)


def _page(conn: Connection, run_id: str, after: str) -> list[str]:
    return list(
        conn.execute(
            select(groups.c.id)
            .where(groups.c.run_id == run_id, groups.c.id > after)
            .order_by(groups.c.id)
            .limit(PAGE_GROUPS)
        ).scalars()
    )


def _steps(lineage: Lineage, totals: dict[str, StepTotals]) -> Iterator[str]:
    """The totals of a surviving step are those of its rows."""
    for step in lineage.surviving:
        if step.batch_digest is None and step.state != StepState.STARTED:
            continue  # written before steps recorded all totals
        found = totals.get(step.id, StepTotals())
        wanted: Json = {"groups": found.groups, "trajectories": found.trajectories}
        if step.state != StepState.STARTED:
            wanted |= {
                "tokens_trained": found.tokens_trained,
                "wasted_tokens": found.wasted_tokens,
                "staleness_max": found.staleness_max,
                "return_mean": found.returns / found.episodes if found.episodes else None,
            }
        for name, value in wanted.items():
            have = getattr(step, name)
            if have != value and (None in (have, value) or not math.isclose(have, value, rel_tol=1e-9, abs_tol=1e-9)):
                yield f"steps {step.id}: {name} is {have}, its rows say {value}"


def _counters(lineage: Lineage, states: Counter[str], skipped: int) -> Iterator[str]:
    """The run's admission counters are those of its groups."""
    run = lineage.run
    expected = {
        "admitted": states.total(),
        "running": states["running"],
        "returned": states["rejected"] + states["stale"],
    }
    for name, value in expected.items():
        if getattr(run, name) != value:
            yield f"runs {run.id}: counter {name} is {getattr(run, name)}, its groups say {value}"
    if run.data_cursor < run.admitted + skipped:
        also = f" and {skipped} tasks skipped" if skipped else ""
        yield f"runs {run.id}: data_cursor is {run.data_cursor}, but {run.admitted} groups were admitted{also}"


def _foreign_rows(conn: Connection, run_id: str) -> Iterator[str]:
    """Training rows that join this run's steps to another run's trajectories."""
    for table in (step_trajectories, replays):
        rows = conn.execute(
            select(table.c.step_id, table.c.trajectory_id)
            .join(steps, steps.c.id == table.c.step_id)
            .outerjoin(trajectories, trajectories.c.id == table.c.trajectory_id)
            .where(steps.c.run_id == run_id, trajectories.c.run_id.is_distinct_from(run_id))
        )
        for step_id, trajectory_id in rows:
            yield f"{table.name} {step_id} {trajectory_id}: the trajectory is not of the step's run"


def _token_facts(conn: Connection, run_id: str) -> Iterator[str]:
    """Facts of a trained trajectory are of all its trained tokens."""
    trained = step_trajectories.c
    rows = conn.execute(
        select(token_facts.c.step_id, token_facts.c.trajectory_id, token_facts.c.tokens, trained.tokens_trained)
        .join(
            step_trajectories,
            and_(trained.step_id == token_facts.c.step_id, trained.trajectory_id == token_facts.c.trajectory_id),
        )
        .join(steps, steps.c.id == token_facts.c.step_id)
        .where(steps.c.run_id == run_id, token_facts.c.tokens != trained.tokens_trained)
    )
    for step_id, trajectory_id, tokens, wanted in rows:
        yield f"token_facts {step_id} {trajectory_id}: facts of {tokens} tokens, but its step trained {wanted}"


def _samples(conn: Connection, run_id: str) -> Iterator[str]:
    """Each trajectory, and each training session that has none, is in one band of the run's samples."""
    bands = sample_flow.of_run(conn, run_id)["bands"]
    t = trajectories.c
    rows = conn.execute(
        select(t.state, func.count(), func.sum(t.trainable_tokens)).where(t.run_id == run_id).group_by(t.state)
    )
    wanted: dict[str, list[int]] = {}
    for state, samples, tokens in rows:
        of_band = wanted.setdefault("waiting" if state in sample_flow.WAITING else state, [0, 0])
        of_band[0], of_band[1] = of_band[0] + samples, of_band[1] + int(tokens)
    bare = ("open", "without calls")
    for name in sorted({*wanted, *(band["band"] for band in bands)} - {*bare}):
        found = [sum(band[what] for band in bands if band["band"] == name) for what in ("samples", "tokens")]
        if found != wanted.get(name, [0, 0]):
            yield f"runs {run_id}: band {name} has {found} samples and tokens, its rows have {wanted.get(name)}"
    count = sum(band["samples"] for band in bands if band["band"] in bare)
    count += conn.execute(select(func.count(t.session_id.distinct())).where(t.run_id == run_id)).scalar_one()
    training = sessions.c.run_id == run_id, sessions.c.is_eval.is_(False)
    of_run = conn.execute(select(func.count()).select_from(sessions).where(*training)).scalar_one()
    if count != of_run:
        yield f"runs {run_id}: {of_run} training sessions, but the bands of its samples have {count}"


def _task_sources(conn: Connection, run_id: str) -> Iterator[str]:
    """A source has as many tasks as it says, without gaps."""
    sources = task_rows.sources(conn, run_id)
    if not sources:
        return
    place = tasks.c.position % len(sources)
    counted = select(place, func.count(), func.max(tasks.c.position)).where(tasks.c.run_id == run_id).group_by(place)
    found = {number: (count, last) for number, count, last in conn.execute(counted)}
    for source in sources:
        count, last = found.get(source.source, (0, None))
        end = None if source.stored == 0 else (source.stored - 1) * len(sources) + source.source
        if (count, last) != (source.stored, end):
            yield f"task_sources {run_id} {source.name}: {source.stored} tasks are recorded, {count} are stored"


def _skipped_tasks(conn: Connection, run_id: str, lineage: Lineage) -> Iterator[str]:
    """A skipped cursor was given out, to no group; its task is the one of that cursor, in a pass after the first."""
    here = (groups.c.run_id == skipped_tasks.c.run_id, groups.c.cursor == skipped_tasks.c.cursor)
    rows = conn.execute(
        select(skipped_tasks, groups.c.id.label("group_id"))
        .outerjoin(groups, and_(*here))
        .where(skipped_tasks.c.run_id == run_id)
        .order_by(skipped_tasks.c.cursor)
    ).all()
    for row in rows:
        name = f"skipped_tasks {run_id} {row.cursor}"
        if row.cursor >= lineage.run.data_cursor:
            yield f"{name}: its cursor was never given out"
            continue
        if row.group_id is not None:
            yield f"{name}: group {row.group_id} has its cursor"
        draw = task_rows.draw(conn, run_id, row.cursor, lineage.run.seed)
        if draw.task.id != row.task_id:
            yield f"{name}: it skipped task {row.task_id}, but its turn was that of {draw.task.id}"
        if draw.number_of_pass == 0:
            yield f"{name}: it is in the first pass"


def _contents(conn: Connection, hashes: Set[str]) -> Iterator[str]:
    """Tools and system messages that calls refer to exist, and match their hash."""
    of_page = select(contents.c.hash, contents.c.body).where(contents.c.hash.in_(sorted(hashes)))
    right = {key: codec.content_hash(body) == key for key, body in conn.execute(of_page)}
    for key in sorted(hashes):
        if not right.get(key, False):
            yield f"contents {key}: {'its body has another hash' if key in right else 'it is missing'}"


def figures(conn: Connection, run_id: str) -> Json:
    """Figures of a run's calls: bridged, forked and why, and how training overlapped sampling."""
    delivered = conn.execute(
        select(interactions.c.bridged, interactions.c.fork_reason, func.count().label("n"))
        .where(interactions.c.run_id == run_id, interactions.c.status == InteractionStatus.COMPLETE)
        .group_by(interactions.c.bridged, interactions.c.fork_reason)
    ).all()
    calls = sum(row.n for row in delivered)
    forks = {row.fork_reason: row.n for row in delivered if row.fork_reason}
    by_status = conn.execute(
        select(interactions.c.status, func.count())
        .where(interactions.c.run_id == run_id)
        .group_by(interactions.c.status)
    )
    return {
        "calls": calls,
        "bridged": sum(row.n for row in delivered if row.bridged),
        "forked": sum(forks.values()),
        "forked_share": sum(forks.values()) / calls if calls else 0.0,
        "fork_reasons": forks,
        "calls_by_status": {row[0]: row[1] for row in by_status},
        **runs.state_counts(conn, run_id),
        **_overlap(conn, run_id),
    }


def _overlap(conn: Connection, run_id: str) -> Json:
    """Seconds of optimizer steps, and how many calls ran during one."""
    spans = [(row.data["start"], row.data["end"]) for row in events.of_run(conn, run_id, "train_step")]
    calls = conn.execute(
        select(interactions.c.created_at, interactions.c.finished_at).where(
            interactions.c.run_id == run_id, interactions.c.status == InteractionStatus.COMPLETE
        )
    ).all()
    during = sum(any(c.created_at < end and c.finished_at > start for start, end in spans) for c in calls)
    return {"train_s": sum(end - start for start, end in spans), "calls_during_training": during}
