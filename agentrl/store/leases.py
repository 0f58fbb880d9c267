"""Claiming groups for a step: whole, oldest first, young enough; and where their trajectories go afterwards."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, select, update

from agentrl.schemas import Json, TrajectoryState
from agentrl.tables import groups, interaction_data, interactions, trajectory_interactions
from agentrl.tables import runs as runs_table
from agentrl.tables import trajectories as trajectories_table

StalePolicy = Literal["mask", "drop"]
"""What one too-old token does to its trajectory: it alone leaves the loss, or the whole trajectory does."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a step may take: groups, their trajectories that are young enough, and those that are not."""

    groups: list[str]
    trajectories: list[str]
    stale: list[str]


def claim(conn: Connection, run_id: str, n_groups: int, *, young: Set[int], policy: StalePolicy) -> Claim | None:
    """The oldest `n_groups` ready groups with at least one young trajectory, or None while there are too few.

    Groups without any are retired on the way. Groups that another transaction holds are passed over. The index
    `ix_groups_untrained` makes the cost depend on `n_groups`, not on how many rows there are.
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
                trajectories_table.c.id, trajectories_table.c.group_id, trajectories_table.c.min_version,
                trajectories_table.c.max_version,
            )
            .where(trajectories_table.c.group_id.in_(page), trajectories_table.c.state == TrajectoryState.READY)
        ).all()  # fmt: skip
        trainable = _trainable(conn, rows, young, policy)
        alive = {row.group_id for row in rows if row.id in trainable}
        found.groups.extend(group_id for group_id in page if group_id in alive)
        found.trajectories.extend(row.id for row in rows if row.id in trainable)
        found.stale.extend(row.id for row in rows if row.id not in trainable and row.group_id in alive)
        _retire(conn, run_id, [group_id for group_id in page if group_id not in alive])
    return found


def assign(conn: Connection, claimed: Claim, step_id: str, epoch: int) -> None:
    """Give a claim to a step."""
    conn.execute(update(groups).where(groups.c.id.in_(claimed.groups)).values(state="leased"))
    lease: Json = {"lease_epoch": epoch, "lease_step_id": step_id}
    for ids, values in (
        (claimed.trajectories, {"state": TrajectoryState.LEASED}),
        (claimed.stale, {"state": TrajectoryState.STALE, "reason": "too_old"}),
    ):
        if ids:
            conn.execute(update(trajectories_table).where(trajectories_table.c.id.in_(ids)).values(lease | values))


def move(conn: Connection, step_id: str, state: TrajectoryState) -> None:
    """Move what a step leased or trained, trajectories and groups, to `state` (ready: the lease is undone)."""
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


def _trainable(conn: Connection, rows: Sequence[Any], young: Set[int], policy: StalePolicy) -> set[str]:
    """Which trajectories have a young token (`mask`), or only young ones (`drop`).

    The ends of a trajectory's version range nearly always decide. Only where versions were rolled back can the inside
    differ from both ends; then the spans are read.
    """
    trainable: set[str] = set()
    doubtful: list[str] = []
    for row in rows:
        ends = [row.min_version in young, row.max_version in young]
        inside = [version in young for version in range(row.min_version + 1, row.max_version)]
        if policy == "mask":
            certain, possible = any(ends), any(inside)
        else:
            certain, possible = all(ends + inside), all(ends)
        if certain:
            trainable.add(row.id)
        elif possible:
            doubtful.append(row.id)
    for trajectory_id, versions in _versions(conn, doubtful).items():
        if versions & young if policy == "mask" else versions <= young:
            trainable.add(trajectory_id)
    return trainable


def _versions(conn: Connection, trajectory_ids: list[str]) -> dict[str, set[int]]:
    """The versions that sampled each trajectory's trainable tokens."""
    versions: dict[str, set[int]] = {tid: set() for tid in trajectory_ids}
    if trajectory_ids:
        rows = conn.execute(
            select(trajectory_interactions.c.trajectory_id, interaction_data.c.spans)
            .join(interaction_data, interaction_data.c.interaction_id == trajectory_interactions.c.interaction_id)
            .join(interactions, interactions.c.id == trajectory_interactions.c.interaction_id)
            .where(trajectory_interactions.c.trajectory_id.in_(trajectory_ids))
            .where(trajectory_interactions.c.owned.is_(True), interactions.c.trainable.is_(True))
        )
        for row in rows:
            versions[row.trajectory_id].update(version for version, _, _ in row.spans)
    return versions


def _retire(conn: Connection, run_id: str, group_ids: list[str]) -> None:
    """Groups that are too old as a whole: stale, and their admission is given back."""
    if not group_ids:
        return
    conn.execute(update(groups).where(groups.c.id.in_(group_ids)).values(state="stale"))
    conn.execute(
        update(trajectories_table)
        .where(trajectories_table.c.group_id.in_(group_ids), trajectories_table.c.state == TrajectoryState.READY)
        .values(state=TrajectoryState.STALE, reason="too_old")
    )
    conn.execute(
        update(runs_table).where(runs_table.c.id == run_id).values(returned=runs_table.c.returned + len(group_ids))
    )
