"""What AReaL's routes ask of the store beyond our own: keys used again, the reward of "now", a session's paths."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sqlalchemy import Connection, literal, select, update

from agentrl.errors import RequestError
from agentrl.schemas import SessionStatus, TrajectoryTokens
from agentrl.store import returns, sessions, trajectories
from agentrl.store.interactions import OF_THE_POLICY
from agentrl.store.rewards import RewardAnswer
from agentrl.store.sessions import Limits
from agentrl.tables import groups, interaction_data, interactions
from agentrl.tables import sessions as sessions_table

RESPONSE_IDS = {
    "openai.chat": "chatcmpl-",
    "openai.completions": "cmpl-",
    "openai.responses": "resp_",
    "anthropic.messages": "msg_",
}


def start(
    conn: Connection, run_id: str, limits: Limits, key_hash: str, task_id: str, *, start_digest: str | None = None
) -> str:
    """Admit a session whose key may have opened an earlier one, which it then opens no more; returns its id.

    Raises RequestError: 409 while the key's session is open, else as `sessions.admit` does.
    """
    with_key = (sessions_table.c.run_id == run_id, sessions_table.c.key_hash == key_hash)
    repeated = (
        start_digest is not None
        and conn.execute(
            select(groups.c.id).where(groups.c.run_id == run_id, groups.c.start_digest == start_digest)
        ).first()
    )
    if not repeated:  # before the run is locked: sessions come first
        conn.execute(
            update(sessions_table)
            .where(*with_key, sessions_table.c.status != SessionStatus.OPEN)
            .values(key_hash=literal("reused:") + sessions_table.c.id)
        )
    group = sessions.start_external(
        conn, run_id, limits, key_hash, {"task_id": task_id}, {}, start_digest=start_digest
    )  # fmt: skip
    (session_id,) = group.session_ids
    # The run is locked now, so that of two starts with one key the second sees the first.
    other = conn.execute(select(sessions_table.c.id).where(*with_key, sessions_table.c.id != session_id)).scalar()
    if other is not None:
        raise RequestError(
            409, f"the API key is bound to session {other}, which is active", code="key_active", param="api_key"
        )
    return session_id


def reward(
    conn: Connection, session_id: str, limits: Limits, *, value: float, interaction_id: str | None,
    idempotency_key: str | None,
) -> RewardAnswer:  # fmt: skip
    """Append a reward; without a call it is the session's, given after its last delivered call.

    Such rewards supersede one another only while no call lies between them: AReaL's agents may reward turn by turn
    without naming calls, and those rewards add up. Raises RequestError: 400 before the first delivered call, else as
    `sessions.reward` does.
    """
    name = "reward"
    if interaction_id is None:
        last = conn.execute(
            select(interactions.c.id)
            .where(interactions.c.session_id == session_id, *OF_THE_POLICY)
            .order_by(interactions.c.seq.desc())
            .limit(1)
        ).scalar()
        if last is None:
            raise RequestError(400, "the session has no interaction that could be rewarded", code="no_interactions")
        name = f"after:{last}"
    return sessions.reward(
        conn, session_id, limits, value=value, interaction_id=interaction_id, name=name,
        idempotency_key=idempotency_key,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Path:
    """A root-to-leaf path (or to any call): the response ids of its calls, its tokens, and each call's return."""

    response_ids: list[str]
    tokens: TrajectoryTokens
    returns: list[float | None]  # None where a call carries no value


def paths(conn: Connection, session_id: str, discount: float, *, each_call: bool) -> list[Path]:
    """The delivered calls of a session, whatever became of it: the path to each call, which trains that call alone,
    or the path to each leaf, of which an output that several share is trained by the first.
    """
    calls = {
        row.interaction_id: row
        for row in conn.execute(
            select(
                interactions.c.id.label("interaction_id"), interactions.c.parent_id, interactions.c.dialect,
                interactions.c.trainable, interactions.c.temperature, interactions.c.kv_mixed,
                sessions_table.c.group_id,
                interaction_data.c.prompt_delta_ids, interaction_data.c.output_ids, interaction_data.c.logprobs,
                interaction_data.c.spans,
            )
            .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
            .join(sessions_table, sessions_table.c.id == interactions.c.session_id)
            .where(interactions.c.session_id == session_id, *OF_THE_POLICY)
            .order_by(interactions.c.seq)
        )
    }  # fmt: skip
    parents: dict[str, str | None] = {call_id: row.parent_id for call_id, row in calls.items()}
    chosen = [_ancestry(call_id, parents) for call_id in parents] if each_call else trajectories.paths(parents)
    credited = returns.of_sessions(conn, [session_id], discount)[session_id]
    versions = {version for row in calls.values() for version, _, _ in row.spans}
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
        tokens, _ = trajectories.assemble(turns, credited, versions)
        names = [RESPONSE_IDS[calls[call_id].dialect] + call_id for call_id in path]
        found.append(Path(names, tokens, [credited.calls.get(call_id) for call_id in path]))
    return found


def _ancestry(call_id: str, parents: dict[str, str | None]) -> list[str]:
    path: list[str] = []
    node: str | None = call_id
    while node is not None:
        path.append(node)
        node = parents[node]
    return path[::-1]
