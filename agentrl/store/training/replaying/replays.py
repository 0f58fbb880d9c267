"""Replays: trained groups with a rare success, which a later batch has once more while their tokens are young.

    a group is trained by step s ──► few of its episodes succeeded, and it is young at step t > s? ──► rows of step t

A trajectory keeps the state `trained` and the lease of its first step. Its replays are the rows of `replays` whose step
survives, so it is trained exactly once and once for each of them. If step s is rolled back, so is every later step, and
nothing of the replay counts. Staleness is the replaying step's: older tokens leave its loss as in any batch, and the
recorded behaviour logprobs correct for the distance.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Set
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select

from agentrl.configs.rollout_config import ReplayConfig
from agentrl.domain.curriculum import Replay
from agentrl.domain.schemas import TRAINED, SessionStatus, StepState, TrajectoryState
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import replays, sessions, steps, trajectories
from agentrl.store.training import returns
from agentrl.store.training.leases import StalePolicy, is_young

Chosen = dict[str, list[Any]]
"""Group → its trajectories that its first step leased, the stale ones too: their rewards stay in the baseline."""


def rule_of(config: ReplayConfig | None) -> Replay | None:
    """The rule of a run's configuration."""
    if config is None:
        return None
    return Replay(success=config.success, most_rate=config.rate, times=config.times, most=config.groups_per_step)


def choose(
    conn: Connection,
    run_id: str,
    rule: Replay,
    *,
    step: int,
    max_staleness: int,
    young: Set[int],
    policy: StalePolicy,
) -> Chosen:
    """The groups that step `step` trains once more: those with the rarest success first, then the oldest."""
    t = trajectories.c
    recent = select(steps.c.id).where(
        steps.c.run_id == run_id,
        steps.c.state.in_(TRAINED),
        steps.c.step < step,
        steps.c.step >= step - max_staleness,  # all tokens of earlier steps are too old
    )
    found: Chosen = defaultdict(list)
    held = (TrajectoryState.TRAINED, TrajectoryState.STALE)
    for row in conn.execute(
        select(t.id, t.group_id, t.session_id, t.state, t.min_version, t.max_version)
        .where(t.lease_step_id.in_(recent), t.state.in_(held))
        .order_by(t.group_id, t.id)
    ):
        found[row.group_id].append(row)
    alive = {group_id for group_id, rows in found.items() if any(not _is_stale(row, young, policy) for row in rows)}
    used = counts(conn, alive)
    alive = {group_id for group_id in alive if used[group_id] < rule.times}
    rates = {group_id: rule.rate(rewards) for group_id, rewards in _rewards(conn, alive).items()}
    rare = [(rate, group_id) for group_id, rate in rates.items() if rule.is_rare(rate)]
    return {group_id: found[group_id] for _, group_id in sorted(rare)[: rule.most]}


def add(conn: Connection, step_id: str, chosen: Chosen, young: Set[int], policy: StalePolicy) -> int:
    """Record what a step trains once more; returns how many trajectories."""
    rows = [
        {"step_id": step_id, "trajectory_id": row.id, "stale": _is_stale(row, young, policy)}
        for of_group in chosen.values()
        for row in of_group
    ]
    if rows:
        conn.execute(insert(replays), rows)
    return sum(not row["stale"] for row in rows)


def of_step(conn: Connection, step_id: str) -> list[Row[Any]]:
    """The trajectories that a step trains once more: their id, group, and whether they are too old at this step."""
    t = trajectories.c
    query = select(t.id, t.group_id, replays.c.stale).join(replays, replays.c.trajectory_id == t.id)
    return list(conn.execute(query.where(replays.c.step_id == step_id).order_by(t.group_id, t.id)))


def remove(conn: Connection, step_id: str) -> None:
    """Forget the replays of a lease that is undone."""
    conn.execute(delete(replays).where(replays.c.step_id == step_id))


def counts(conn: Connection, group_ids: Iterable[str]) -> Counter[str]:
    """Group → how many surviving steps have trained it once more, or are about to."""
    t = trajectories.c
    surviving = (
        select(t.group_id, func.count(replays.c.step_id.distinct()))
        .join(replays, replays.c.trajectory_id == t.id)
        .join(steps, steps.c.id == replays.c.step_id)
        .where(steps.c.state != StepState.ROLLED_BACK)
        .group_by(t.group_id)
    )
    return Counter(
        {
            group_id: int(count)
            for ids in parts(sorted(group_ids))
            for group_id, count in conn.execute(surviving.where(t.group_id.in_(ids)))
        }
    )


def _is_stale(row: Row[Any], young: Set[int], policy: StalePolicy) -> bool:
    return row.state == TrajectoryState.STALE or not is_young(row, young, policy)


def _rewards(conn: Connection, group_ids: Iterable[str]) -> dict[str, list[float]]:
    """Group → the rewards of its completed, rewarded episodes."""
    c = sessions.c
    completed = select(c.id, c.group_id).where(
        c.status == SessionStatus.COMPLETED, c.parent_session_id.is_(None), c.is_baseline.is_(False)
    )
    episodes = [row for ids in parts(sorted(group_ids)) for row in conn.execute(completed.where(c.group_id.in_(ids)))]
    facts = returns.applied(conn, [row.id for row in episodes])
    found: dict[str, list[float]] = defaultdict(list)
    for row in episodes:
        if facts[row.id].any:
            found[row.group_id].append(facts[row.id].total)
    return found
