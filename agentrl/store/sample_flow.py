"""Where the samples of a run went: each trajectory, and each training session that has none, is in one band.

sampled ─┬─ trained
         ├─ waiting             ready, or leased by a step
         ├─ stale: REASON       too_old, tied
         ├─ rejected: REASON    baseline, no_reward, no_trainable_tokens, what the agent said, …
         ├─ open                sessions that have not ended, or whose trajectories are not built yet
         └─ without calls       ended sessions without trajectories: failed and abandoned ones, and completed ones
                                in which the policy answered no call

Trained trajectories are summed from the steps; the rest is counted in the indexes of untrained rows. So the cost grows
with the samples that never train, and with the steps.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, Integer, func, literal_column, select

from agentrl.domain.schemas import TRAINED, Json, TrajectoryState
from agentrl.store import runs
from agentrl.store.tables import sessions, steps, trajectories

WAITING = (TrajectoryState.READY, TrajectoryState.LEASED)
NONE: ColumnElement[int] = literal_column("0", Integer)
"""Not a parameter: then SQLite reads the index `ix_sessions_bare` alone."""


def of_run(conn: Connection, run_id: str) -> Json:
    """`samples` in all, and the `bands`: `band`, `reason` (or null), `samples`, and `tokens` that could be trained.

    Evaluations are not counted.
    """
    bands = [*_untrained(conn, run_id), *_trained(conn, run_id), *_of_sessions(conn, run_id)]
    return {"samples": sum(band["samples"] for band in bands), "bands": bands}


def _untrained(conn: Connection, run_id: str) -> list[Json]:
    tokens = func.coalesce(func.sum(trajectories.c.trainable_tokens), 0)
    rows = conn.execute(
        select(trajectories.c.state, trajectories.c.reason, func.count(), tokens)
        .where(trajectories.c.run_id == run_id, trajectories.c.state != TrajectoryState.TRAINED)
        .group_by(trajectories.c.state, trajectories.c.reason)
        .order_by(trajectories.c.state, trajectories.c.reason)
    )
    found: dict[tuple[str, str | None], list[int]] = {}
    for state, reason, samples, trainable in rows:
        key = ("waiting", None) if state in WAITING else (str(state), reason)
        counts = found.setdefault(key, [0, 0])
        counts[0] += samples
        counts[1] += int(trainable)
    return [_band(*key, *counts) for key, counts in found.items()]


def _trained(conn: Connection, run_id: str) -> list[Json]:
    """The trainable tokens of a step are trained, too old, or of a stale trajectory, which counts in another band. What
    a step trains once more is counted once.
    """
    done = (steps.c.run_id == run_id, steps.c.state.in_(TRAINED))
    samples, tokens, old_steps = conn.execute(
        select(
            func.coalesce(func.sum(steps.c.trajectories), 0),
            func.coalesce(func.sum(steps.c.tokens_trained + steps.c.wasted_tokens), 0),
            func.count().filter(steps.c.batch_digest.is_(None)),
        ).where(*done)
    ).one()
    if old_steps:  # written before steps recorded all totals
        counted = select(func.count(), func.coalesce(func.sum(trajectories.c.trainable_tokens), 0))
        samples, tokens = conn.execute(
            counted.where(trajectories.c.run_id == run_id, trajectories.c.state == TrajectoryState.TRAINED)
        ).one()
    else:
        tokens -= conn.execute(
            select(func.coalesce(func.sum(trajectories.c.trainable_tokens), 0))
            .join(steps, steps.c.id == trajectories.c.lease_step_id)
            .where(
                trajectories.c.run_id == run_id,
                trajectories.c.state == TrajectoryState.STALE,
                trajectories.c.state != TrajectoryState.TRAINED,  # lets SQLite use `ix_trajectories_untrained`
                steps.c.state.in_(TRAINED),
            )
        ).scalar_one()
        again = runs.trained_again(conn, run_id)
        samples, tokens = samples - again.trajectories, tokens - again.tokens  # the step of its lease has counted it
    return [_band("trained", None, samples, int(tokens))] if samples else []


def _of_sessions(conn: Connection, run_id: str) -> list[Json]:
    training = (sessions.c.run_id == run_id, sessions.c.is_eval.is_(False), sessions.c.built.is_(False))
    going_on = conn.execute(select(func.count()).where(*training)).scalar_one()
    without = (
        select(sessions.c.status, func.count())
        .where(sessions.c.run_id == run_id, sessions.c.trajectories == NONE)
        .group_by(sessions.c.status)
        .order_by(sessions.c.status)
    )
    found = [_band("without calls", status, samples) for status, samples in conn.execute(without)]
    return [*([_band("open", None, going_on)] if going_on else []), *found]


def _band(band: str, reason: str | None, samples: int, tokens: int = 0) -> Json:
    return {"band": band, "reason": reason, "samples": int(samples), "tokens": tokens}
