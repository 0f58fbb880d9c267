"""A session's token tree, which finds the earlier call that a new call extends.

    call 1 ── call 2 ── call 4        a path: each call extends the tokens of its parent
         └─── call 3                  a branch

A call's key is the chained hash of its conversation, its own answer included. The parent of a new call is the deepest
call whose key lies on the chain of the new conversation. Only the messages after it have to be rendered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import ID_BYTES, packed, unpacked
from agentrl.rendering.conversation import canonical
from agentrl.store.calls.call_tree import Node

W = TypeVar("W", str, bytes)
CONTEXT_TOKENS = 8
"""How many ids before a piece are decoded with it: no character spans more tokens."""
CAPACITY = 4096
"""How many trees a `TreeCache` keeps."""
Decode = Callable[[list[int]], str]
First = Callable[[Node, int | None], W]
"""(call, n) → the first n of a call's own ids, or all for None: as packed ids or as text."""
Loader = Callable[[str, int, Mapping[str, Node]], Awaitable[tuple[int, list[Node]]]]
"""(session, seq, calls up to seq by id) → the session's last seq, and the calls after the given one."""


@dataclass(slots=True)
class Tree:
    """The committed calls of one session up to the store's sequence number `seq`, by conversation key and by id."""

    seq: int = 0
    nodes: dict[bytes, Node] = field(default_factory=dict)
    by_id: dict[str, Node] = field(default_factory=dict)
    _texts: dict[tuple[str, int | None], str] = field(default_factory=dict)  # (call, number of own ids) → text

    def add(self, node: Node) -> None:
        """Add a call; it replaces an earlier call with an equal conversation as parent of new calls."""
        self.nodes[node.conversation_key] = node
        if node.textless_key is not None:
            self.nodes[node.textless_key] = node
        self.by_id[node.id] = node

    def deepest(self, chain: Sequence[bytes]) -> tuple[int, Node] | None:
        """(messages covered, call) of the deepest call whose conversation, with its answer, is on the chain."""
        for depth in range(len(chain) - 1, 0, -1):
            node = self.nodes.get(chain[depth])
            if node is not None:
                return depth, node
        return None

    def branches_at(self, node: Node, delta: Sequence[int]) -> bool:
        """Whether other calls extend `node`, and none has the prompt `delta` (a retry or a sibling would have it)."""
        calls = self.by_id.values()
        below = [call.own_ids for call in calls if call.parent is not None and call.parent.id == node.id]
        prompt = packed(delta)
        return bool(below) and not any(ids.startswith(prompt) for ids in below)

    def below(self, node: Node) -> set[str]:
        """The ids of all descendants of `node`."""
        found = {node.id}
        for call in self.by_id.values():  # parents come before their children
            if call.parent is not None and call.parent.id in found:
                found.add(call.id)
        return found - {node.id}

    def longest_prefix(self, ids: Sequence[int]) -> tuple[Node, int] | None:
        """The call with the longest sequence that is a prefix of `ids`, and its length."""
        return _in_ids(self._longest(packed(ids), _first_ids))

    def longest_text(self, prompt: str, decode: Decode) -> tuple[Node, int] | None:
        """The call with the longest text that is a prefix of `prompt`, and its length."""
        return self._longest(prompt, partial(self._spelled, decode))

    def nearest_prompt(self, raw: str | list[int], decode: Decode) -> tuple[Node, int] | None:
        """The call with the longest prompt that is a prefix of the raw prompt, and its length."""
        if isinstance(raw, str):
            return self._longest_prompt(raw, partial(self._spelled, decode))
        return _in_ids(self._longest_prompt(packed(raw), _first_ids))

    def _spelled(self, decode: Decode, node: Node, count: int | None) -> str:
        """The text of the first `count` of a call's own ids."""
        if (node.id, count) not in self._texts:
            context = node.parent.ids[-CONTEXT_TOKENS:] if node.parent is not None else []
            own = unpacked(_first_ids(node, count))
            self._texts[node.id, count] = decode(context + own)[len(decode(context)) :]
        return self._texts[node.id, count]

    def _longest(self, whole: W, first: First[W]) -> tuple[Node, int] | None:
        """The call with the longest path that is a prefix of `whole`, and the length of that path."""
        found = [(node, end) for node, _, end in self._begun(whole, first) if end is not None]
        return max(found, key=_length, default=None)

    def _longest_prompt(self, whole: W, first: First[W]) -> tuple[Node, int] | None:
        """The same for paths that end with the call's prompt, without its answer."""
        found = []
        for node, start, end in self._begun(whole, first):
            prompt = first(node, node.n_delta)
            if end is not None or whole.startswith(prompt, start):
                found.append((node, start + len(prompt)))
        return max(found, key=_length, default=None)

    def _begun(self, whole: W, first: First[W]) -> Iterator[tuple[Node, int, int | None]]:
        """Calls whose parent's path is a prefix of `whole`: the call, the length of that path, and of its own path.

        The last is None where the call's own path is not a prefix of `whole`.
        """
        ends: dict[str, int] = {}
        for node in self.by_id.values():  # parents come before their children
            start = 0 if node.parent is None else ends.get(node.parent.id)
            if start is None:
                continue
            own = first(node, None)
            if whole.startswith(own, start):
                ends[node.id] = start + len(own)
            yield node, start, ends.get(node.id)


def with_texts(messages: Sequence[Json], node: Node) -> list[Json]:
    """The messages, with the texts put back that their client dropped from the answers on the path to `node`."""
    whole = list(messages)
    above: Node | None = node
    while above is not None:
        at = above.messages - 1
        if above.text is not None and "content" not in canonical(whole[at]):
            whole[at] = whole[at] | {"content": above.text}
        above = above.parent
    return whole


def _length(found: tuple[Node, int]) -> int:
    return found[1]


def _in_ids(found: tuple[Node, int] | None) -> tuple[Node, int] | None:
    """The same, with a length in ids instead of bytes."""
    return None if found is None else (found[0], found[1] // ID_BYTES)


def _first_ids(node: Node, count: int | None) -> bytes:
    """The first `count` of a call's own ids, packed; all for None."""
    return node.own_ids if count is None else node.own_ids[: count * ID_BYTES]


class TreeCache:
    """The trees of the sessions that were used last; others are loaded from the store."""

    def __init__(self, load: Loader, capacity: int = CAPACITY) -> None:
        self._load = load
        self._capacity = capacity
        self._trees: OrderedDict[str, Tree] = OrderedDict()

    async def get(self, session_id: str, *, fresh: bool = False) -> Tree:
        """The session's tree; with `fresh`, including the calls that any replica has committed since it was loaded."""
        tree = self._trees.get(session_id)
        if tree is None or fresh:
            tree = tree or Tree()
            seq, nodes = await self._load(session_id, tree.seq, tree.by_id)
            for node in nodes:
                if node.id not in tree.by_id:  # committed here while it was read
                    tree.add(node)
            tree.seq = max(tree.seq, seq)
        self._keep(session_id, tree)
        return tree

    def plant(self, session_id: str) -> None:
        """Keep an empty tree for a session that has just been opened."""
        self._keep(session_id, Tree())

    def _keep(self, session_id: str, tree: Tree) -> None:
        self._trees[session_id] = tree
        self._trees.move_to_end(session_id)
        while len(self._trees) > self._capacity:
            del self._trees[next(iter(self._trees))]

    def commit(self, session_id: str, seq: int, node: Node | None) -> None:
        """Add a call that was committed as number `seq`, if the tree has all calls before it; otherwise `get` loads it.

        `node` is None for a call to an upstream.
        """
        tree = self._trees.get(session_id)
        if tree is not None and seq == tree.seq + 1:
            tree.seq = seq
            if node is not None:
                tree.add(node)

    def forget(self, session_id: str) -> None:
        """Drop a session's tree."""
        self._trees.pop(session_id, None)
