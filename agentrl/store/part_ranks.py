"""The processes of a run's parts on all hosts, each owned by the task runner that holds its lease.

absent ── claim ──► waiting ── announce ──► running ── release ──► ended
                       ▲                       │                     │
                       └───── claim ───────────┴─────────────────────┘   the lease is over, or was released

Leases are by the database's clock. The ranks of a gang work on one attempt: when a rank dies, `died` moves the
part to the next attempt, once, and every rank starts again for that attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, case, or_, select, update

from agentrl.domain.schemas import Json
from agentrl.store import events
from agentrl.store.db import codec, upsert
from agentrl.store.db.clock import database_time
from agentrl.store.tables import part_ranks, parts, runs

DEATHS_KEPT = 100
"""Times of deaths kept in a part's row."""


@dataclass(frozen=True, slots=True)
class Order:
    """The orders for a part's ranks. `failure`: the part was given up."""

    wanted: str
    attempt: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a part. `lease_s`: seconds until its lease ends; negative when it is over."""

    part: str
    rank: int
    runner: str
    host: str
    address: str
    state: str
    attempt: int | None
    ports: Mapping[str, int]
    pid: int | None
    status: int | None
    starts: int
    lease_s: float

    @property
    def live(self) -> bool:
        """Whether a runner holds the rank's lease."""
        return self.lease_s > 0 and self.state != "ended"


def declare(conn: Connection, run_id: str, specs: Mapping[str, Json]) -> None:
    """Set what parts the run wants, by name. Parts that are not named are to stop; failures are forgotten.

    A part that was stopped or given up begins a new attempt. One that runs goes on.
    """
    over = or_(parts.c.wanted == "stopped", parts.c.failure.is_not(None))
    for name, spec in specs.items():
        wanted: Json = {"spec": spec, "wanted": "running", "failure": None, "deaths": []}
        following = case((over, parts.c.attempt + 1), else_=parts.c.attempt)
        conn.execute(
            upsert.insert(conn, parts)
            .values(run_id=run_id, name=name, attempt=1, **wanted)
            .on_conflict_do_update(index_elements=["run_id", "name"], set_=wanted | {"attempt": following})
        )
    stop(conn, run_id, keep=list(specs))


def stop(conn: Connection, run_id: str, keep: Sequence[str] = ()) -> None:
    """Let all parts but `keep` stop: their runners end the commands, and then themselves."""
    conn.execute(update(parts).where(parts.c.run_id == run_id, parts.c.name.not_in(keep)).values(wanted="stopped"))


def find(conn: Connection, run_id: str, part: str) -> Row[Any] | None:
    """A part's row: spec, wanted, attempt, deaths, failure; None when the run has no such part."""
    return conn.execute(select(parts).where(parts.c.run_id == run_id, parts.c.name == part)).first()


def order(conn: Connection, run_id: str, part: str) -> Order | None:
    """The orders for a part's ranks; None when the run has no such part."""
    row = find(conn, run_id, part)
    return row and Order(row.wanted, row.attempt, row.failure)


def claim(
    conn: Connection, run_id: str, part: str, rank: int, runner: str, *, host: str, address: str, lease_s: float
) -> Rank | None:
    """Take a rank's lease for a runner; returns the rank as it was before, or None while another runner holds it.

    A rank that was never claimed is returned with `starts` 0 and no attempt.
    """
    now = database_time(conn)
    mine = _mine(run_id, part, rank)
    before = conn.execute(select(part_ranks).where(mine).with_for_update()).first()
    values = {
        "runner": runner,
        "host": host,
        "address": address,
        "state": "waiting",
        "attempt": None,
        "pid": None,
        "claimed_at": now,
        "leased_until": now + lease_s,
    }
    if before is not None and before.runner != runner and before.leased_until > now:
        return None
    taken = conn.execute(
        upsert.insert(conn, part_ranks)
        .values(run_id=run_id, part=part, rank=rank, ports={}, starts=0, **values)
        .on_conflict_do_update(
            index_elements=["run_id", "part", "rank"],
            set_=values,
            where=(part_ranks.c.leased_until <= now) | (part_ranks.c.runner == runner),
        )
        .returning(part_ranks.c.rank)
    ).first()
    if taken is None:  # another runner was first
        return None
    if before is None:
        return Rank(part, rank, runner, host, address, "ended", None, {}, None, None, 0, 0.0)
    return _rank(before, now)


def renew(conn: Connection, run_id: str, part: str, rank: int, runner: str, lease_s: float) -> Order | None:
    """Extend a runner's lease; returns what the part is to do, or None when the runner has lost the rank."""
    until = database_time(conn) + lease_s
    held = _held(run_id, part, rank, runner)
    if not conn.execute(update(part_ranks).where(held).values(leased_until=until)).rowcount:
        return None
    return order(conn, run_id, part)


def announce(
    conn: Connection, run_id: str, part: str, rank: int, runner: str, attempt: int, ports: Mapping[str, int]
) -> None:
    """Say which ports a rank uses in an attempt. Nothing happens when the runner has lost the rank."""
    held = _held(run_id, part, rank, runner)
    values = {"attempt": attempt, "ports": dict(ports), "state": "waiting", "pid": None, "status": None}
    conn.execute(update(part_ranks).where(held).values(values))


def started(conn: Connection, run_id: str, part: str, rank: int, runner: str, pid: int) -> None:
    """Record that a rank's command runs."""
    held = _held(run_id, part, rank, runner)
    values = {"state": "running", "pid": pid, "starts": part_ranks.c.starts + 1}
    conn.execute(update(part_ranks).where(held).values(values))
    facts = {"part": part, "rank": rank, "pid": pid}
    events.record(conn, run_id, "part_started", facts, runner)


def release(conn: Connection, run_id: str, part: str, rank: int, runner: str, status: int | None) -> None:
    """End a runner's lease at once, with the exit status of its command."""
    held = _held(run_id, part, rank, runner)
    values = {"state": "ended", "status": status, "leased_until": 0.0, "pid": None}
    conn.execute(update(part_ranks).where(held).values(values))


def died(
    conn: Connection,
    run_id: str,
    part: str,
    rank: int,
    *,
    attempt: int,
    gang: bool,
    status: int | None,
    window_s: float,
) -> int:
    """Record that a rank died in an attempt, and move a gang to the next attempt; returns the deaths within `window_s`.

    `status` is the exit status of its command; None when its host or runner was lost. Ranks of a gang that end because
    another rank died report the same attempt: it counts once.
    """
    now = database_time(conn)
    row = conn.execute(select(parts.c.attempt, parts.c.deaths).where(*_part(run_id, part)).with_for_update()).one()
    deaths = [at for at in row.deaths if at > now - window_s]
    if not gang or row.attempt == attempt:
        deaths = [*deaths, now][-DEATHS_KEPT:]
        following = row.attempt + 1 if gang else row.attempt
        conn.execute(update(parts).where(*_part(run_id, part)).values(attempt=following, deaths=deaths))
        facts = {"part": part, "rank": rank, "attempt": attempt, "status": status}
        events.record(conn, run_id, "part_died", facts, f"{part}/{rank}")
    return len(deaths)


def give_up(conn: Connection, run_id: str, part: str, why: str) -> None:
    """Record why a part is not started again. The first reason stays."""
    unfailed = parts.c.failure.is_(None)
    conn.execute(update(parts).where(*_part(run_id, part), unfailed).values(failure=codec.error_text(why)))


def ranks(conn: Connection, run_id: str, part: str | None = None) -> list[Rank]:
    """The processes of a part, or of all parts, by part and rank."""
    now = database_time(conn)
    query = select(part_ranks).where(part_ranks.c.run_id == run_id).order_by(part_ranks.c.part, part_ranks.c.rank)
    return [_rank(row, now) for row in conn.execute(query if part is None else query.where(part_ranks.c.part == part))]


def failures(conn: Connection, run_id: str) -> dict[str, str]:
    """Why parts were given up, by name."""
    failed = and_(parts.c.run_id == run_id, parts.c.failure.is_not(None))
    return {row.name: row.failure for row in conn.execute(select(parts.c.name, parts.c.failure).where(failed))}


def ended_by_themselves(conn: Connection, run_id: str) -> bool:
    """Whether the commands of all parts that end by themselves (`ends` in their spec) have ended for good.

    A rank that its scheduler took away has no exit status; one of an earlier start has an earlier attempt.
    """
    rows = conn.execute(select(parts).where(parts.c.run_id == run_id)).all()
    expected = {(row.name, rank, row.attempt) for row in rows if row.spec.get("ends") for rank in range(_size(row))}
    over = [rank for rank in ranks(conn, run_id) if rank.state == "ended" and rank.status is not None]
    return expected <= {(rank.part, rank.rank, rank.attempt) for rank in over}


def are_over(conn: Connection, run_id: str, names: Sequence[str]) -> bool:
    """Whether some of these parts were stopped, given up, or done in a run that is to go on.

    Their runners have ended, or are ending.
    """
    ours = conn.execute(select(parts).where(parts.c.run_id == run_id, parts.c.name.in_(names))).all()
    if any(part.wanted == "stopped" or part.failure is not None for part in ours):
        return True
    attempts = {part.name: part.attempt for part in ours}
    done = [rank for rank in ranks(conn, run_id) if rank.state == "ended" and rank.status is not None]
    goes_on = runs.c.published_step < runs.c.target_steps
    return any(rank.attempt == attempts.get(rank.part) for rank in done) and bool(
        conn.execute(select(runs.c.id).where(runs.c.id == run_id, goes_on)).first()
    )


def _size(part: Row[Any]) -> int:
    return int(part.spec.get("ranks", 1))


def _part(run_id: str, part: str) -> tuple[ColumnElement[bool], ...]:
    return parts.c.run_id == run_id, parts.c.name == part


def _mine(run_id: str, part: str, rank: int) -> ColumnElement[bool]:
    return and_(part_ranks.c.run_id == run_id, part_ranks.c.part == part, part_ranks.c.rank == rank)


def _held(run_id: str, part: str, rank: int, runner: str) -> ColumnElement[bool]:
    """Whether the runner owns the rank."""
    return and_(_mine(run_id, part, rank), part_ranks.c.runner == runner, part_ranks.c.state != "ended")


def _rank(row: Row[Any], now: float) -> Rank:
    return Rank(
        part=row.part,
        rank=row.rank,
        runner=row.runner,
        host=row.host,
        address=row.address,
        state=row.state,
        attempt=row.attempt,
        ports=row.ports,
        pid=row.pid,
        status=row.status,
        starts=row.starts,
        lease_s=row.leased_until - now,
    )
