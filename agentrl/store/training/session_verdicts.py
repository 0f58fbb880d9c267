"""The verdicts of sessions: which of their tokens train. A sub-agent's session is rejected with its root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sqlalchemy import Connection, select, update

from agentrl.domain.schemas import Json
from agentrl.domain.verdicts import EVERYTHING, Range, Verdict, check_ranges
from agentrl.errors import bad_parameter
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.db import codec
from agentrl.store.tables import interactions, sessions


def of_sessions(conn: Connection, session_ids: Sequence[str]) -> dict[str, Verdict]:
    """The verdict of each session."""
    root = sessions.alias("root")
    rows = conn.execute(
        select(sessions.c.id, sessions.c.verdict, root.c.verdict.label("of_root"))
        .outerjoin(root, root.c.id == sessions.c.root_session_id)
        .where(sessions.c.id.in_(session_ids))
    )
    return {row.id: below(Verdict.of(row.of_root), Verdict.of(row.verdict)) for row in rows}


def below(root: Verdict, own: Verdict) -> Verdict:
    """The verdict of a session below `root`."""
    return own if root.rejected is None else replace(own, rejected=root.rejected)


def record(conn: Connection, session_id: str, verdict: Verdict) -> None:
    """Store the verdict of a locked session; its calls may be named by the ids of their responses.

    Raises RequestError 422 for calls and tokens that the session has not sampled.
    """
    if verdict == EVERYTHING:
        return
    if verdict.ranges is not None:
        verdict = replace(verdict, ranges={codec.call_id(k): of_call for k, of_call in verdict.ranges.items()})
        _check(conn, session_id, verdict.ranges or {})
    stored: Json | None = verdict.stored()
    conn.execute(update(sessions).where(sessions.c.id == session_id).values(verdict=stored))


def _check(conn: Connection, session_id: str, ranges: Mapping[str, Sequence[Range]]) -> None:
    of_session = (interactions.c.session_id == session_id, *OF_THE_POLICY)
    found = conn.execute(select(interactions.c.id, interactions.c.output_tokens).where(*of_session))
    lengths = {row.id: int(row.output_tokens) for row in found}
    for call_id, of_call in ranges.items():
        if call_id not in lengths:
            raise bad_parameter("trained_tokens", f"trained_tokens: the session has no call {call_id}", 422)
        if (fault := check_ranges(of_call, lengths[call_id])) is not None:
            raise bad_parameter("trained_tokens", f"trained_tokens: of call {call_id}, {fault}", 422)
