"""Loads a session's token tree: its delivered calls, each with the tokens that follow its parent's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, case, select

from agentrl.domain.tokens import TokenIds
from agentrl.store.calls.policy_calls import OF_THE_POLICY
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions, sessions


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A delivered call in a session's token tree. It stores only the tokens that follow its parent's."""

    id: str
    conversation_key: bytes
    parent: Node | None
    ids: TokenIds  # prompt and output, from the root on
    n_delta: int  # prompt ids after the parent's sequence
    role: str
    system_hash: str | None
    tools_hash: str | None
    messages: int  # of the conversation, the answer included; 0 when unknown
    textless_key: bytes | None = None  # for clients that drop the answer's text
    text: str | None = None  # the answer's text

    @property
    def own_ids(self) -> bytes:
        """The packed ids of the tokens that follow the parent's."""
        return self.ids.behind(len(self.parent.ids) if self.parent is not None else 0)

    @property
    def n_output(self) -> int:
        """The number of tokens that this call sampled."""
        return len(self.ids) - self.n_delta - (len(self.parent.ids) if self.parent is not None else 0)


def load_tree(
    conn: Connection, session_id: str, after: int = 0, known: Mapping[str, Node] | None = None
) -> tuple[int, list[Node]]:
    """The session's sequence number, and its delivered calls to the policy numbered above `after`, oldest first.

    `known` holds the calls up to `after`, by id.
    """
    seq = conn.execute(select(sessions.c.seq).where(sessions.c.id == session_id)).scalar_one()
    rows = conn.execute(
        select(
            interactions.c.id,
            interactions.c.parent_id,
            interactions.c.conversation_key,
            interactions.c.role,
            interactions.c.system_hash,
            interactions.c.tools_hash,
            interactions.c.messages,
            interactions.c.textless_key,
            interaction_data.c.prompt_delta_ids,
            interaction_data.c.output_ids,
            case((interactions.c.textless_key.is_not(None), interaction_data.c.answer)).label("answer"),
        )
        .join(interaction_data, interaction_data.c.interaction_id == interactions.c.id)
        .where(interactions.c.session_id == session_id, interactions.c.seq > after, *OF_THE_POLICY)
        .order_by(interactions.c.seq)
    )
    before, nodes = known or {}, dict[str, Node]()
    for row in rows:
        delta_ids: list[int] = codec.unpack_ids(row.prompt_delta_ids).tolist()
        own_ids = [*delta_ids, *codec.unpack_ids(row.output_ids).tolist()]
        parent = (nodes.get(row.parent_id) or before[row.parent_id]) if row.parent_id else None
        nodes[row.id] = Node(
            id=row.id,
            conversation_key=bytes.fromhex(row.conversation_key),
            parent=parent,
            ids=(parent.ids if parent else TokenIds()).extended(own_ids),
            n_delta=len(delta_ids),
            role=row.role,
            system_hash=row.system_hash,
            tools_hash=row.tools_hash,
            messages=row.messages,
            textless_key=None if row.textless_key is None else bytes.fromhex(row.textless_key),
            text=None if row.answer is None else codec.unpack_json(row.answer)["content"],
        )
    return int(seq), list(nodes.values())
