"""A prompt that is ready to be sampled, as token ids."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.domain.tokens import TokenIds
from agentrl.store.calls.call_tree import Node
from agentrl.store.db.codec import Content


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt: `token_ids` = the parent's full sequence + `delta_ids`."""

    token_ids: TokenIds
    delta_ids: list[int]
    parent: Node | None
    fork_reason: ForkReason | None
    role: Role
    system: Content | None
    tools: Content | None
    new_messages: list[Json]  # the messages after the parent's or, without a parent, after the system prompt
    messages: int  # number of messages in the request's conversation
    chain: bytes  # key of the request's conversation; the answer extends it
    opening: list[int]  # the end of `delta_ids` that belongs to the answer: the beginning of a forced tool call
    grammar: Json  # what the rest of a forced tool call must match, as the engine's parameter

    @property
    def inherited_rows(self) -> int:
        """The positions that earlier calls computed: the parent's sequence without its last token."""
        return len(self.parent.ids) - 1 if self.parent is not None else 0


def sequence_of(parent: Node | None, delta: list[int]) -> TokenIds:
    """The parent's full sequence, then `delta`."""
    return (parent.ids if parent is not None else TokenIds()).extended(delta)


def stored(hash: str | None) -> Content | None:
    """Contents that the store has already, by their hash."""
    return None if hash is None else Content(hash, None)
