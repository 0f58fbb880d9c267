"""Store functions that only AReaL's routes need: reused keys, rewards of the last call, a session's paths."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, literal, select, update

from agentrl.domain.batches.outline import joined
from agentrl.domain.schemas import Role, SessionStatus, TrajectoryTokens
from agentrl.errors import RequestError
from agentrl.store.calls.policy_calls import OF_THE_POLICY, STORE
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import roles, session_rewards
from agentrl.store.sessions.group_starts import NewGroup
from agentrl.store.sessions.session_limits import Limits
from agentrl.store.tables import groups, interaction_data, interactions, rewards
from agentrl.store.tables import sessions as sessions_table
from agentrl.store.training import returns, session_verdicts, trajectories
from agentrl.store.training.paths import path_outlines, path_tokens

RESPONSE_IDS = {
    "openai.chat": "chatcmpl-",
    "openai.completions": "cmpl-",
    "openai.responses": "resp_",
    "anthropic.messages": "msg_",
}


def open_session(conn: Connection, run_id: str, key_hash: str, start_digest: str | None) -> str | None:
    """The open session of a key; None where the start repeats an earlier one."""
    if _is_repeated(conn, run_id, start_digest):
        return None
    of_key = (sessions_table.c.run_id == run_id, sessions_table.c.key_hash == key_hash)
    is_open = sessions_table.c.status == SessionStatus.OPEN
    return conn.execute(select(sessions_table.c.id).where(*of_key, is_open)).scalar()


def start(
    conn: Connection,
    run_id: str,
    limits: Limits,
    key_hashes: list[str],
    task_id: str,
    *,
    start_digest: str | None = None,
) -> NewGroup:
    """Admit a group of sessions. A key that opened an earlier, ended session opens the new one from now on.

    Raises RequestError: 409 while a key's earlier session is open, else as `group_admission.admit` does.
    """
    with_key = (sessions_table.c.run_id == run_id, sessions_table.c.key_hash.in_(key_hashes))
    if not _is_repeated(conn, run_id, start_digest):  # before the run is locked: sessions come first
        conn.execute(
            update(sessions_table)
            .where(*with_key, sessions_table.c.status != SessionStatus.OPEN)
            .values(key_hash=literal("reused:") + sessions_table.c.id)
        )
    group = group_starts.start_external(
        conn, run_id, limits, key_hashes, {"task_id": task_id}, {}, start_digest=start_digest
    )
    # The run is locked from here on: of two starts with one key, the second sees the first.
    others = select(sessions_table.c.id).where(*with_key, sessions_table.c.id.not_in(group.session_ids))
    if (other := conn.execute(others).scalar()) is not None:
        raise RequestError(
            409, f"the API key is bound to session {other}, which is active", code="key_active", param="api_key"
        )
    return group


def _is_repeated(conn: Connection, run_id: str, start_digest: str | None) -> bool:
    started = select(groups.c.id).where(groups.c.run_id == run_id, groups.c.start_digest == start_digest)
    return start_digest is not None and conn.execute(started).first() is not None


@dataclass(frozen=True, slots=True)
class Rewarded:
    """The effect of a reward. `interactions` counts the session's delivered calls; `first`: whether it is its first
    reward.
    """

    applied: bool
    interactions: int
    first: bool


def reward(
    conn: Connection,
    session_id: str,
    limits: Limits,
    *,
    value: float,
    interaction_id: str | None,
    idempotency_key: str | None,
) -> Rewarded:
    """Append a reward to a call; by default to the last delivered call, side calls (`roles.side_at_end`) only if there
    is no other.

    A later reward of a call replaces the earlier one. Raises RequestError: 400 before the first delivered
    call, else as `session_rewards.reward` does.
    """
    known = delivered(conn, session_id)
    if interaction_id is None:
        if not known:
            raise RequestError(400, "the session has no interaction that could be rewarded", code="no_interactions")
        side = roles.side_at_end(conn, session_id) | {call.id for call in known if call.role == Role.SIDE}
        interaction_id = next((call.id for call in reversed(known) if call.id not in side), known[-1].id)
    first = not is_rewarded(conn, session_id)
    answer = session_rewards.reward(
        conn, session_id, limits, value=value, interaction_id=interaction_id, idempotency_key=idempotency_key
    )
    return Rewarded(answer.applied, len(known), first)


def is_rewarded(conn: Connection, session_id: str) -> bool:
    """Whether a session has any reward."""
    return conn.execute(select(rewards.c.id).where(rewards.c.session_id == session_id).limit(1)).first() is not None


def delivered(conn: Connection, session_id: str) -> list[Any]:
    """The calls that the policy answered, in order of their answers, except those sent with `store: false`."""
    calls = conn.execute(
        select(interactions.c.id, interactions.c.role, interactions.c.options)
        .where(interactions.c.session_id == session_id, *OF_THE_POLICY)
        .order_by(interactions.c.seq)
    )
    return [call for call in calls if _is_stored(call)]


def _is_stored(call: Any) -> bool:
    return (call.options or {}).get(STORE) is not False


@dataclass(frozen=True, slots=True)
class Path:
    """A path from the root to a leaf or to any call: the calls' response ids, the tokens, and each call's return."""

    response_ids: list[str]
    tokens: TrajectoryTokens
    returns: list[float | None]  # None where a call carries no value


def paths(conn: Connection, session_id: str, discount: float, *, each_call: bool) -> list[Path]:
    """The paths of a session's delivered calls, in any status of the session.

    With `each_call` the path to each call, which trains that call alone. Otherwise the path to each leaf. An output
    that several paths share is trained in the first.
    """
    calls = {
        row.interaction_id: row
        for row in conn.execute(
            select(
                interactions.c.id.label("interaction_id"),
                interactions.c.parent_id,
                interactions.c.dialect,
                interactions.c.options,
                interactions.c.trainable,
                interactions.c.temperature,
                interactions.c.kv_mixed,
                interactions.c.prompt_tokens,
                interactions.c.prompt_digest,
                interactions.c.output_tokens,
                interactions.c.finish_reason,
                sessions_table.c.group_id,
                interaction_data.c.prompt_delta_ids,
                interaction_data.c.output_ids,
                interaction_data.c.logprobs,
                interaction_data.c.spans,
            )
            .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
            .join(sessions_table, sessions_table.c.id == interactions.c.session_id)
            .where(interactions.c.session_id == session_id, *OF_THE_POLICY)
            .order_by(interactions.c.seq)
        )
    }
    parents: dict[str, str | None] = {call_id: row.parent_id for call_id, row in calls.items()}
    stored = [call_id for call_id, row in calls.items() if _is_stored(row)]
    led_to = {step for call_id in stored for step in trajectories.path_to(call_id, parents)}
    kept = {call_id: parent_id for call_id, parent_id in parents.items() if call_id in led_to}
    chosen = [trajectories.path_to(call_id, parents) for call_id in stored] if each_call else trajectories.paths(kept)
    credited = returns.of_sessions(conn, [session_id], discount)[session_id]
    verdict = session_verdicts.of_sessions(conn, [session_id])[session_id]
    spans = {call_id: row.spans for call_id, row in calls.items()}
    versions = {version for of_call in spans.values() for version, _, _ in of_call}
    taken: set[str] = set()
    found = []
    for path in chosen:
        owned = {path[-1]} if each_call else set(path) - taken
        taken |= owned
        turns: list[Any] = [
            SimpleNamespace(
                **calls[call_id]._mapping, owned=call_id in owned, trajectory_id=path[-1], session_id=session_id
            )
            for call_id in path
        ]
        outline = path_outlines.outline(turns, spans, credited, verdict, versions)
        tokens = joined(outline, path_tokens.of_calls(turns))
        names = [RESPONSE_IDS[calls[call_id].dialect] + call_id for call_id in path]
        found.append(Path(names, tokens, [credited.calls.get(call_id) for call_id in path]))
    return found


def paths_of_all(conn: Connection, session_ids: list[str], discount: float, *, each_call: bool) -> list[Path]:
    """`paths` of several sessions, one after the other."""
    return [path for each in session_ids for path in paths(conn, each, discount, each_call=each_call)]
