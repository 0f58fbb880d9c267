"""Leases: claims the oldest ready groups for a step, and moves groups and trajectories between states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, select, update

from agentrl.domain.schemas import Json, TrajectoryState
from agentrl.domain.ties import tied
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import groups, sessions
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import trajectories as trajectories_table
from agentrl.store.training.trajectories import rejected

StalePolicy = Literal["mask", "drop"]
"""Effect of a token that is too old: `mask` removes it from the loss, `drop` removes its whole trajectory."""


WITHOUT_GREEDY = "it began without a greedy episode"
"""The reason of groups that are older than a run's greedy baseline."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of a step: groups, their trajectories that are young enough, and those that are too old."""

    groups: list[str]
    trajectories: list[str]
    stale: list[str]


def claim(
    conn: Connection,
    run_id: str,
    n_groups: int,
    *,
    young: Set[int],
    policy: StalePolicy,
    skip_tied: bool = False,
    needs_greedy: bool = False,
) -> Claim | None:
    """The oldest `n_groups` ready groups with at least one young trajectory, or None while there are too few.

    Groups without a young trajectory become stale; with `skip_tied`, so do groups whose episodes all have the same
    return; with `needs_greedy`, groups that began without a greedy session are rejected. Groups that another
    transaction has locked are skipped. By the index `ix_groups_untrained` the cost depends on `n_groups`, not on the
    number of rows.
    """
    found = Claim([], [], [])
    after = ""
    while len(found.groups) < n_groups:
        wanted = n_groups - len(found.groups)
        page = list(
            conn.execute(
                select(groups.c.id)
                .where(groups.c.run_id == run_id, groups.c.state == "ready", groups.c.state != "trained")
                .where(groups.c.id > after)
                .order_by(groups.c.id)
                .limit(wanted)
                .with_for_update(skip_locked=True, key_share=True)
            ).scalars()
        )
        if not page:
            return None
        after = page[-1]
        rows = conn.execute(
            select(
                trajectories_table.c.id,
                trajectories_table.c.group_id,
                trajectories_table.c.min_version,
                trajectories_table.c.max_version,
                trajectories_table.c["return"].label("outcome"),
            ).where(trajectories_table.c.group_id.in_(page), trajectories_table.c.state == TrajectoryState.READY)
        ).all()
        trainable = {row.id for row in rows if is_young(row, young, policy)}
        alive = {row.group_id for row in rows if row.id in trainable}
        _retire(conn, run_id, [group_id for group_id in page if group_id not in alive], "too_old")
        if needs_greedy:
            with_one = select(sessions.c.group_id).where(
                sessions.c.group_id.in_(alive), sessions.c.is_baseline.is_(True)
            )
            without = alive - set(conn.execute(with_one).scalars())
            leave_out(conn, run_id, sorted(without), WITHOUT_GREEDY)
            alive -= without
        if skip_tied:
            tied = _tied(rows) & alive
            _retire(conn, run_id, sorted(tied), "tied")
            alive -= tied
        found.groups.extend(group_id for group_id in page if group_id in alive)
        found.trajectories.extend(row.id for row in rows if row.id in trainable and row.group_id in alive)
        found.stale.extend(row.id for row in rows if row.id not in trainable and row.group_id in alive)
    return found


def assign(conn: Connection, claimed: Claim, step_id: str, epoch: int) -> None:
    """Lease a claim to a step."""
    for some in parts(claimed.groups):
        conn.execute(update(groups).where(groups.c.id.in_(some)).values(state="leased"))
    lease: Json = {"lease_epoch": epoch, "lease_step_id": step_id}
    for ids, values in (
        (claimed.trajectories, {"state": TrajectoryState.LEASED}),
        (claimed.stale, {"state": TrajectoryState.STALE, "reason": "too_old"}),
    ):
        for some in parts(ids):
            conn.execute(update(trajectories_table).where(trajectories_table.c.id.in_(some)).values(lease | values))


def set_state(conn: Connection, step_id: str, state: TrajectoryState) -> None:
    """Move the trajectories and groups that a step leased or trained to `state`; READY undoes the lease."""
    of_step = select(trajectories_table.c.group_id).where(trajectories_table.c.lease_step_id == step_id)
    conn.execute(
        update(groups).where(groups.c.id.in_(of_step), groups.c.state.in_(["leased", "trained"])).values(state=state)
    )
    held = [TrajectoryState.LEASED, TrajectoryState.TRAINED]
    values: Json = {"state": state}
    if state == TrajectoryState.READY:
        held.append(TrajectoryState.STALE)
        values |= {"lease_step_id": None, "lease_epoch": None, "reason": None}
    conn.execute(
        update(trajectories_table)
        .where(trajectories_table.c.lease_step_id == step_id, trajectories_table.c.state.in_(held))
        .values(values)
    )


def reject(conn: Connection, run_id: str, step_id: str, reasons: Mapping[str, str]) -> None:
    """Reject groups that a step has leased, each with a reason, and give their admission back."""
    for group_id, reason in reasons.items():
        conn.execute(update(groups).where(groups.c.id == group_id).values(state="rejected", reject_reason=reason))
        conn.execute(
            update(trajectories_table)
            .where(trajectories_table.c.group_id == group_id, trajectories_table.c.lease_step_id == step_id)
            .values(state=TrajectoryState.REJECTED, reason=rejected(reason), lease_step_id=None, lease_epoch=None)
        )
    conn.execute(
        update(runs_table).where(runs_table.c.id == run_id).values(returned=runs_table.c.returned + len(reasons))
    )


def is_young(trajectory: Any, young: Set[int], policy: StalePolicy) -> bool:
    """Whether a trajectory has a young token (`mask`), or only young ones (`drop`).

    A later version is never older than an earlier one (`staleness.ages`), so one end of its range decides.
    """
    return (trajectory.max_version if policy == "mask" else trajectory.min_version) in young


def _tied(rows: Iterable[Any]) -> set[str]:
    """Groups whose episodes all have the same return (`tied`), groups of one episode included."""
    outcomes: dict[str, set[float]] = {}
    for row in rows:
        outcomes.setdefault(row.group_id, set()).add(row.outcome)
    return {group_id for group_id, values in outcomes.items() if tied(values)}


def _retire(conn: Connection, run_id: str, group_ids: list[str], reason: str) -> None:
    """Make groups stale, and give their admission back."""
    _close(conn, run_id, group_ids, {"state": "stale"}, {"state": TrajectoryState.STALE, "reason": reason})


def leave_out(conn: Connection, run_id: str, group_ids: list[str], reason: str) -> None:
    """Reject ready groups, and give their admission back."""
    of_paths = {"state": TrajectoryState.REJECTED, "reason": rejected(reason)}
    _close(conn, run_id, group_ids, {"state": "rejected", "reject_reason": reason}, of_paths)


def _close(conn: Connection, run_id: str, group_ids: list[str], of_groups: Json, of_paths: Json) -> None:
    if not group_ids:
        return
    conn.execute(update(groups).where(groups.c.id.in_(group_ids)).values(of_groups))
    conn.execute(
        update(trajectories_table)
        .where(trajectories_table.c.group_id.in_(group_ids), trajectories_table.c.state == TrajectoryState.READY)
        .values(of_paths)
    )
    conn.execute(
        update(runs_table).where(runs_table.c.id == run_id).values(returned=runs_table.c.returned + len(group_ids))
    )
