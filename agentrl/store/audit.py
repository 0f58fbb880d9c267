"""Check a run's promises from its rows: token-exact bridges, exactly-once training, bounded staleness, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sqlalchemy import Connection, func, select, text

from agentrl.config import RunConfig
from agentrl.schemas import InteractionStatus, Json, StepState, TrajectoryState
from agentrl.store import codec, events, runs
from agentrl.tables import groups, interaction_data, interactions, step_trajectories, steps, trajectories


def violations(conn: Connection, run_id: str) -> list[str]:
    """Every broken promise of a run, one line each, naming the offending row; empty when all hold."""
    return [
        *_calls(conn, run_id),
        *_exactly_once(conn, run_id),
        *_staleness(conn, run_id),
        *_counters(conn, run_id),
    ]


def figures(conn: Connection, run_id: str) -> Json:
    """What the run's calls were: how many bridged, how many forked and why, and how training overlapped sampling."""
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


def _calls(conn: Connection, run_id: str) -> Iterator[str]:
    """A bridged prompt is its parent's prompt + output + its own delta; logprobs and spans cover the output."""
    rows = conn.execute(
        select(
            interactions.c.id, interactions.c.parent_id, interactions.c.bridged, interactions.c.prompt_digest,
            interactions.c.output_tokens, interaction_data.c.prompt_delta_ids, interaction_data.c.output_ids,
            interaction_data.c.logprobs, interaction_data.c.spans,
        )
        .outerjoin(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.run_id == run_id, interactions.c.status == InteractionStatus.COMPLETE)
        .order_by(interactions.c.session_id, interactions.c.seq)
    )  # fmt: skip
    sequences: dict[str, list[int]] = {}
    for row in rows:
        if row.output_ids is None:
            yield f"call {row.id} is complete but holds no tokens"
            continue
        output, delta = codec.unpack_ids(row.output_ids).tolist(), codec.unpack_ids(row.prompt_delta_ids).tolist()
        if row.bridged != (row.parent_id is not None):
            yield f"call {row.id}: bridged is {row.bridged} but its parent is {row.parent_id}"
        if row.parent_id is not None and row.parent_id not in sequences:
            yield f"call {row.id}: its parent {row.parent_id} was not delivered before it"
        prompt = sequences.get(row.parent_id or "", []) + delta
        if row.prompt_digest != codec.ids_digest(prompt):
            yield f"call {row.id}: the engine got another prompt than its parent's tokens and its own delta"
        if not len(output) == row.output_tokens == len(codec.unpack_logprobs(row.logprobs)):
            yield f"call {row.id}: output ids, logprobs and count disagree"
        borders = [0, *(end for _, _, end in row.spans)]
        if borders[-1] != len(output) or [start for _, start, _ in row.spans] != borders[:-1]:
            yield f"call {row.id}: version spans {row.spans} do not cover {len(output)} tokens"
        sequences[row.id] = prompt + output


def _exactly_once(conn: Connection, run_id: str) -> Iterator[str]:
    surviving = (
        select(step_trajectories.c.trajectory_id, func.count().label("n"))
        .join(steps, steps.c.id == step_trajectories.c.step_id)
        .where(steps.c.run_id == run_id, steps.c.state != StepState.ROLLED_BACK)
        .group_by(step_trajectories.c.trajectory_id)
        .subquery()
    )
    rows = conn.execute(
        select(trajectories.c.id, trajectories.c.state, func.coalesce(surviving.c.n, 0).label("n"))
        .outerjoin(surviving, surviving.c.trajectory_id == trajectories.c.id)
        .where(trajectories.c.run_id == run_id)
    )
    for row in rows:
        if row.n != (row.state == TrajectoryState.TRAINED):
            yield f"trajectory {row.id} is {row.state} and was trained by {row.n} surviving steps"
    shared = conn.execute(
        text(
            "SELECT ti.interaction_id FROM trajectory_interactions ti JOIN trajectories t ON t.id = ti.trajectory_id "
            "WHERE t.run_id = :run AND ti.owned GROUP BY ti.interaction_id HAVING count(*) > 1"
        ),
        {"run": run_id},
    )
    for (interaction_id,) in shared:
        yield f"call {interaction_id} is owned by several trajectories"


def _staleness(conn: Connection, run_id: str) -> Iterator[str]:
    bound = RunConfig.model_validate(runs.get(conn, run_id).config).trainer.max_staleness
    rows = conn.execute(
        select(steps.c.step, step_trajectories.c.trajectory_id, step_trajectories.c.staleness_max)
        .join(steps, steps.c.id == step_trajectories.c.step_id)
        .where(steps.c.run_id == run_id, step_trajectories.c.staleness_max > bound)
    )
    for row in rows:
        yield f"step {row.step} trained {row.trajectory_id} at staleness {row.staleness_max} > {bound}"


def _counters(conn: Connection, run_id: str) -> Iterator[str]:
    run = runs.get(conn, run_id)
    by_state = conn.execute(
        select(groups.c.state, func.count())
        .where(groups.c.run_id == run_id, groups.c.is_eval.is_(False))
        .group_by(groups.c.state)
    )
    states = Counter({row[0]: row[1] for row in by_state})
    expected = {
        "admitted": states.total(),
        "running": states["running"],
        "returned": states["rejected"] + states["stale"],
    }
    for name, value in expected.items():
        if getattr(run, name) != value:
            yield f"run {run.name}: counter {name} is {getattr(run, name)}, its groups say {value}"


def _overlap(conn: Connection, run_id: str) -> Json:
    """Seconds of optimizer steps, and how many calls were running at some moment of one."""
    spans = [(row.data["start"], row.data["end"]) for row in events.of_run(conn, run_id, "train_step")]
    calls = conn.execute(
        select(interactions.c.created_at, interactions.c.finished_at).where(
            interactions.c.run_id == run_id, interactions.c.status == InteractionStatus.COMPLETE
        )
    ).all()
    during = sum(any(c.created_at < end and c.finished_at > start for start, end in spans) for c in calls)
    return {"train_s": sum(end - start for start, end in spans), "calls_during_training": during}
