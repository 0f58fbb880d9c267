"""The prompt of a conversation: an earlier call's exact tokens and a bridge to them, or a full rendering.

conversation ─► deepest recorded call on its chain ─► bridge ─► parent's tokens + delta
                 └ none, or no bridge: fork ────────► full rendering
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.prompts.fork_reasons import place, why_not_deeper
from agentrl.proxy.calls.prompts.fork_rules import Place
from agentrl.proxy.calls.prompts.prompt_lengths import written
from agentrl.proxy.calls.prompts.prompt_options import opening_of, renderer_of
from agentrl.proxy.calls.prompts.rendered_prompt import Prompt, sequence_of, stored
from agentrl.proxy.calls.token_tree import Tree, with_texts
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.rendering.conversation import canonical, chain_keys, root_key
from agentrl.rendering.divergence import leading_system
from agentrl.store.calls.call_tree import Node
from agentrl.store.db.codec import Content

BRIDGED_FASTER = 8
"""How many times faster a bridge is than a rendering: it renders the earlier turns, but does not encode them."""


async def chat_prompt(context: CallContext, session_id: str, request: ModelRequest, role: Role | None) -> Prompt:
    """The prompt of a conversation. Raises RequestError 400."""
    messages, tools = request.messages, request.tools
    heavy = partial(context.heavy.run, session_id, size_of(request))
    chain = await heavy(_chain, request)
    tree = await context.trees.get(session_id)
    hit = tree.deepest(chain)
    if _holds_answer(messages[hit[0] if hit is not None else 0 :]):  # another replica may have recorded it
        tree = await context.trees.get(session_id, fresh=True)
        hit = tree.deepest(chain)
    if hit is not None and context.settings.restore_dropped_text:
        messages = with_texts(messages, hit[1])
        request = replace(request, messages=messages)
    opening, grammar = opening_of(context, request)
    start = await _start(context, session_id, request, tree, hit)
    parent, n_system = start.parent, leading_system(messages)
    if parent is not None and hit is not None and parent is hit[1]:
        system, known_tools = stored(parent.system_hash), stored(parent.tools_hash)
    else:
        system, known_tools = await heavy(_contents, messages[:n_system], tools)
    delta = start.delta + opening
    return Prompt(
        token_ids=sequence_of(parent, delta),
        delta_ids=delta,
        parent=parent,
        fork_reason=start.reason,
        role=role or start.role,
        system=system,
        tools=known_tools,
        new_messages=messages[start.covered or n_system :],
        messages=len(messages),
        chain=chain[-1],
        opening=opening,
        grammar=grammar,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """The two parts of a conversation's prompt: `parent` covers the first `covered` messages, `delta` the others."""

    parent: Node | None
    delta: list[int]
    covered: int
    role: Role
    reason: ForkReason | None


async def _start(
    context: CallContext, session_id: str, request: ModelRequest, tree: Tree, hit: tuple[int, Node] | None
) -> _Start:
    """The conversation's ids and the call that they extend: the hit, or another recorded call that begins them."""
    messages, tools = request.messages, request.tools
    renderer = renderer_of(context, request)
    if hit is not None:
        depth, node = hit
        after = messages[depth:]
        bridging = partial(renderer.bridge, node.ids, after, tools, messages_before=messages[:depth])
        bridge = await context.heavy.run(session_id, written(after) + size_of(request) // BRIDGED_FASTER, bridging)
        if bridge.delta_ids is not None:
            start = _Start(parent=node, delta=bridge.delta_ids, covered=depth, role=Role(node.role), reason=None)
            if not _may_go_deeper(tree, start, messages):
                return start
            deeper = _exact(tree, node.ids.extended(bridge.delta_ids), messages, depth)
            return await _explained(context, session_id, request, tree, deeper or start)
        found = Place(role=Role(node.role), reason=bridge.reason)
    else:
        depth = 0
        found = await place(context.store, session_id, request)
    ids = await context.heavy.run(session_id, size_of(request), renderer.render, messages, tools)
    exact = _exact(tree, ids, messages, 0)
    if exact is None:
        return _Start(parent=None, delta=ids, covered=0, role=found.role, reason=found.reason)
    if exact.covered < depth:  # the reason is why the hit could not be extended
        return replace(exact, reason=found.reason)
    return await _explained(context, session_id, request, tree, exact)


def size_of(request: ModelRequest) -> int:
    """About how many bytes the conversation has, the conversation that it continues included."""
    return request.size if request.previous_id is None else max(request.size, written(request.messages))


def _chain(request: ModelRequest) -> list[bytes]:
    """The keys of a conversation's prefixes, from the empty one to the whole conversation."""
    root = root_key(request.tools, request.template_options)
    return [root, *chain_keys(root, request.messages)]


def _contents(system: Sequence[Json], tools: Sequence[Json] | None) -> tuple[Content | None, Content | None]:
    """The system prompt and the tools, which calls share and the store holds once."""
    plain = [canonical(message) for message in system]
    return Content.of(plain) if plain else None, Content.of(tools) if tools else None


def _may_go_deeper(tree: Tree, start: _Start, messages: Sequence[Json]) -> bool:
    """Whether the messages that a call adds may replace recorded turns below the call that it extends."""
    assert start.parent is not None
    return _holds_answer(messages[start.covered :]) or tree.branches_at(start.parent, start.delta)


async def _explained(context: CallContext, session_id: str, request: ModelRequest, tree: Tree, start: _Start) -> _Start:
    """The start with its fork reason, if other calls extend the same parent."""
    assert start.parent is not None
    if not _may_go_deeper(tree, start, request.messages):
        return start
    below = tree.below(start.parent)
    return replace(start, reason=await why_not_deeper(context.store, session_id, request, start.covered, below))


def _exact(tree: Tree, ids: Sequence[int], messages: Sequence[Json], covered: int) -> _Start | None:
    """The deepest call whose whole sequence begins `ids`, if it covers more than `covered` of the messages."""
    found = tree.longest_prefix(ids)
    if found is None:
        return None
    node, length = found
    if not covered < node.messages < len(messages) or length == len(ids):
        return None
    if messages[node.messages - 1]["role"] != "assistant":
        return None
    return _Start(parent=node, delta=list(ids[length:]), covered=node.messages, role=Role(node.role), reason=None)


def _holds_answer(messages: Sequence[Json]) -> bool:
    return any(message["role"] == "assistant" for message in messages)
