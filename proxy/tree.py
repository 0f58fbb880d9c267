"""A session's token tree: finding the earlier call that a new one extends.

A call's key is the chained hash of the conversation it ended with, its own answer included. The deepest earlier call
whose key lies on the new conversation's chain is the parent, so what follows it is all that has to be rendered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.rendering import Renderer
from agentrl.rendering.conversation import chain_key, root_key
from agentrl.schemas import ForkReason, Json
from agentrl.store.interactions import Node

Loader = Callable[[str], Awaitable[tuple[int, list[Node]]]]


@dataclass(slots=True)
class Tree:
    """The delivered calls of one session, by conversation key. `seq` is the store's number that this reflects."""

    seq: int
    nodes: dict[bytes, Node] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """A later call with an equal conversation takes the earlier one's place."""
        self.nodes[node.conversation_key] = node


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a call's prompt came to be: `token_ids` = the parent's full sequence + `delta_ids`."""

    token_ids: list[int]
    delta_ids: list[int]
    new_messages: list[Json]
    parent_id: str | None
    fork_reason: ForkReason | None
    chain: bytes  # key of the request's conversation; the answer extends it


class TreeCache:
    """The trees of the sessions used last; a miss loads from the store."""

    def __init__(self, load: Loader, capacity: int = 4096) -> None:
        self._load = load
        self._capacity = capacity
        self._trees: OrderedDict[str, Tree] = OrderedDict()

    async def get(self, session_id: str, *, fresh: bool = False) -> Tree:
        """The session's tree; `fresh` reads the store again."""
        tree = self._trees.get(session_id)
        if tree is None or fresh:
            seq, nodes = await self._load(session_id)
            tree = Tree(seq)
            for node in nodes:
                tree.add(node)
            self._trees[session_id] = tree
        self._trees.move_to_end(session_id)
        while len(self._trees) > self._capacity:
            self._trees.popitem(last=False)
        return tree

    def commit(self, session_id: str, seq: int, node: Node) -> None:
        """A call was committed as number `seq`; a gap means that others committed too, and the cache is dropped."""
        tree = self._trees.get(session_id)
        if tree is None:
            return
        if seq == tree.seq + 1:
            tree.seq = seq
            tree.add(node)
        else:
            self.forget(session_id)

    def forget(self, session_id: str) -> None:
        """Drop a session's tree."""
        self._trees.pop(session_id, None)


async def prompt_for(
    trees: TreeCache, renderer: Renderer, session_id: str, messages: list[Json], tools: list[Json] | None
) -> Prompt:
    """Render a call: extend the parent's exact tokens where the conversation does, else render it whole.

    A conversation that holds answers but extends no recorded call is a fork, for a reason; before one is declared
    the store is read again, because another replica may have recorded the parent.
    """
    chain = [root_key(tools, None)]
    for message in messages:
        chain.append(chain_key(chain[-1], message))
    tree = await trees.get(session_id)
    hit = _deepest(tree, chain)
    answered = any(message["role"] == "assistant" for message in messages)
    if hit is None and answered:
        tree = await trees.get(session_id, fresh=True)
        hit = _deepest(tree, chain)
    reason: ForkReason | None = None
    if hit is not None:
        depth, node = hit
        bridge = renderer.bridge(node.token_ids, messages[depth:], tools, messages_before=messages[:depth])
        if bridge.delta_ids is not None:
            return Prompt(
                token_ids=node.token_ids + bridge.delta_ids,
                delta_ids=bridge.delta_ids,
                new_messages=messages[depth:],
                parent_id=node.id,
                fork_reason=None,
                chain=chain[-1],
            )
        reason = bridge.reason
    elif answered and tree.nodes:
        reason = ForkReason.HISTORY_EDITED
    ids = renderer.render(messages, tools)
    return Prompt(
        token_ids=ids, delta_ids=ids, new_messages=messages, parent_id=None, fork_reason=reason, chain=chain[-1]
    )


def _deepest(tree: Tree, chain: Sequence[bytes]) -> tuple[int, Node] | None:
    """(messages covered, node) of the deepest call on the chain that leaves at least one message to add."""
    for depth in range(len(chain) - 2, 0, -1):
        node = tree.nodes.get(chain[depth])
        if node is not None:
            return depth, node
    return None
