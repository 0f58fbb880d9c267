"""What teachers that are servers scored, kept before a step learns from it: a repeated step reads the same numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, select

from agentrl.domain.schemas import Float32
from agentrl.store.db import codec, upsert
from agentrl.store.db.id_lists import parts
from agentrl.store.tables import teacher_logprobs
from agentrl.store.training.trainer_epochs import check_epoch


def keep(conn: Connection, run_id: str, epoch: int, teacher: str, found: Mapping[str, Float32]) -> None:
    """Keep the logprobs of sampled tokens, by trajectory. Those that are known stay. Raises FencedError for an older
    epoch.
    """
    check_epoch(conn, run_id, epoch)
    rows = [
        {"trajectory_id": name, "teacher": teacher, "tokens": len(one), "data": codec.pack_logprobs(one)}
        for name, one in found.items()
    ]
    if rows:
        conn.execute(upsert.insert(conn, teacher_logprobs).on_conflict_do_nothing(), rows)


def read(conn: Connection, teacher: str, trajectory_ids: Sequence[str]) -> dict[str, Float32]:
    """Trajectory → the teacher's logprobs of its sampled tokens; those that it has not scored are left out."""
    columns = teacher_logprobs.c
    of_teacher = select(columns.trajectory_id, columns.data).where(columns.teacher == teacher)
    return {
        row.trajectory_id: codec.unpack_logprobs(row.data)
        for ids in parts(trajectory_ids)
        for row in conn.execute(of_teacher.where(columns.trajectory_id.in_(ids)))
    }
