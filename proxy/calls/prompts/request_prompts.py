"""How a call's prompt comes to be: an earlier call's exact tokens and what follows them, or a rendering of its own.

chat: conversation ──► deepest recorded call on its chain ──► bridge ──► parent's tokens + delta
                         └ none, or no bridge: fork ────────► full rendering
raw (Completions): text or ids ──► recorded call that they begin with, token by token ──► the rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from agentrl.domain.schemas import ForkReason, Json, Role
from agentrl.domain.tokens import TokenIds
from agentrl.errors import RequestError
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.prompts import prompt_lengths
from agentrl.proxy.calls.prompts.fork_reasons import place, why_not_deeper
from agentrl.proxy.calls.prompts.fork_rules import Place, raw_place
from agentrl.proxy.calls.prompts.prompt_lengths import written
from agentrl.proxy.calls.token_tree import Tree, with_texts
from agentrl.proxy.dialects.dialect import ModelRequest, Named
from agentrl.rendering import OutputParser, Renderer
from agentrl.rendering.conversation import canonical, chain_key, chain_keys, root_key
from agentrl.rendering.divergence import leading_system
from agentrl.rendering.options import with_thinking
from agentrl.store.calls.call_tree import Node
from agentrl.store.db.codec import Content

RAW = root_key(None, {"raw": True})
"""Where the keys of raw prompts begin: no conversation has them."""
BRIDGED_FASTER = 8
"""How many times faster a bridge is than rendering: it writes the earlier turns, but does not encode them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt, ready to be sampled: `token_ids` = the parent's full sequence + `delta_ids`."""

    token_ids: TokenIds
    delta_ids: list[int]
    parent: Node | None
    fork_reason: ForkReason | None
    role: Role
    system: Content | None
    tools: Content | None
    new_messages: list[Json]  # what follows the parent's, or the system's
    messages: int  # of the request's conversation
    chain: bytes  # key of the request's conversation; the answer extends it
    opening: list[int]  # the end of `delta_ids` that belongs to the answer: a forced tool call's beginning
    grammar: Json  # what the rest of a forced tool call must match, as the engine's parameter


async def prompts_for(context: CallContext, session_id: str, request: ModelRequest, role: Role | None) -> list[Prompt]:
    """The prompts of a request; `role` is what the caller says of it. Raises RequestError."""
    await context.heavy.run(session_id, _size(request), prompt_lengths.check, request, context.renderer)
    if request.prompts:
        tree = await context.trees.get(session_id, fresh=True)  # nothing in a raw prompt says what it extends
        return [await _raw_prompt(context, session_id, tree, prompt, role) for prompt in request.prompts]
    return [await _chat_prompt(context, session_id, request, role)]


def parser_after(context: CallContext, request: ModelRequest, before: Sequence[int]) -> OutputParser:
    """A parser for an answer to `before`, a prompt without its opening. With tool_choice `none` a tool call is text."""
    if request.prompts:
        return context.renderer.text_parser()
    tools = None if request.tool_choice == "none" else request.callable_tools
    return renderer_of(context, request).parser(tools, before)


def told_to_think(context: CallContext, request: ModelRequest) -> ModelRequest:
    """The request with `thinks` among its template options, where the model's format has an option for it."""
    options = with_thinking(request.template_options, request.thinks, context.renderer.thinking_option)
    return replace(request, template_options=options)


def renderer_of(context: CallContext, request: ModelRequest) -> Renderer:
    """The model's renderer, told the request's options. Raises RequestError 400 for one that it does not have."""
    return context.renderer.with_options(request.template_options) if request.template_options else context.renderer


async def _chat_prompt(context: CallContext, session_id: str, request: ModelRequest, role: Role | None) -> Prompt:
    messages, tools = request.messages, request.tools
    heavy = partial(context.heavy.run, session_id, _size(request))
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
        system, known_tools = _known(parent.system_hash), _known(parent.tools_hash)
    else:
        system, known_tools = await heavy(_contents, messages[:n_system], tools)
    delta = start.delta + opening
    return Prompt(
        token_ids=_behind(parent, delta),
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
    """Where a conversation's prompt begins: `parent` stands for `covered` messages, `delta` for the others."""

    parent: Node | None
    delta: list[int]
    covered: int
    role: Role
    reason: ForkReason | None


async def _start(
    context: CallContext, session_id: str, request: ModelRequest, tree: Tree, hit: tuple[int, Node] | None
) -> _Start:
    """The conversation's ids and what they extend: the hit, or whatever recorded call they begin with all the same."""
    messages, tools = request.messages, request.tools
    renderer = renderer_of(context, request)
    if hit is not None:
        depth, node = hit
        after = messages[depth:]
        bridging = partial(renderer.bridge, node.ids, after, tools, messages_before=messages[:depth])
        bridge = await context.heavy.run(session_id, written(after) + _size(request) // BRIDGED_FASTER, bridging)
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
    ids = await context.heavy.run(session_id, _size(request), renderer.render, messages, tools)
    exact = _exact(tree, ids, messages, 0)
    if exact is None:
        return _Start(parent=None, delta=ids, covered=0, role=found.role, reason=found.reason)
    if exact.covered < depth:  # what the hit lost is the reason
        return replace(exact, reason=found.reason)
    return await _explained(context, session_id, request, tree, exact)


def _size(request: ModelRequest) -> int:
    """About how many bytes it takes to say the conversation, what it goes on with included."""
    return request.size if request.previous_id is None else max(request.size, written(request.messages))


def _chain(request: ModelRequest) -> list[bytes]:
    """The keys of a conversation: of nothing, of its first message, and so on to all of it."""
    root = root_key(request.tools, request.template_options)
    return [root, *chain_keys(root, request.messages)]


def _contents(system: Sequence[Json], tools: Sequence[Json] | None) -> tuple[Content | None, Content | None]:
    """What calls share, to be stored once."""
    plain = [canonical(message) for message in system]
    return Content.of(plain) if plain else None, Content.of(tools) if tools else None


def _may_go_deeper(tree: Tree, start: _Start, messages: Sequence[Json]) -> bool:
    """Whether what a call adds to the one that it extends may stand in the place of recorded turns."""
    assert start.parent is not None
    return _holds_answer(messages[start.covered :]) or tree.branches_at(start.parent, start.delta)


async def _explained(context: CallContext, session_id: str, request: ModelRequest, tree: Tree, start: _Start) -> _Start:
    """The start with its reason, where other calls go on from what it extends."""
    assert start.parent is not None
    if not _may_go_deeper(tree, start, request.messages):
        return start
    below = tree.below(start.parent)
    return replace(start, reason=await why_not_deeper(context.store, session_id, request, start.covered, below))


def _exact(tree: Tree, ids: Sequence[int], messages: Sequence[Json], covered: int) -> _Start | None:
    """The deepest call whose whole sequence begins `ids`, if it stands for more than `covered` of the messages."""
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


async def _raw_prompt(
    context: CallContext, session_id: str, tree: Tree, prompt: str | list[int], role: Role | None
) -> Prompt:
    heavy = partial(context.heavy.run, session_id, len(prompt))
    ids = await heavy(context.renderer.encode, prompt) if isinstance(prompt, str) else prompt
    _check_vocabulary(ids, context.renderer.vocab_size)
    hit = _raw_parent(context, tree, prompt)
    parent, behind = hit if hit is not None else (None, ids)
    if isinstance(behind, str):
        start = context.renderer.encode("")
        delta = (await heavy(context.renderer.encode, behind))[len(start) :]
    else:
        delta = behind
    if parent is None:
        found = raw_place(tree, prompt, context.renderer.decode, context.renderer.stop_token_ids)
        found = replace(found, role=role or found.role)
    else:
        found = Place(role=Role(parent.role), reason=None)
    text = prompt if isinstance(prompt, str) else context.renderer.decode(prompt)
    whole = _behind(parent, delta)
    return Prompt(
        token_ids=whole,
        delta_ids=delta,
        parent=parent,
        fork_reason=found.reason,
        role=found.role,
        system=_known(parent.system_hash) if parent is not None else None,
        tools=_known(parent.tools_hash) if parent is not None else None,
        new_messages=[{"role": "raw", "content": text if parent is None else context.renderer.decode(delta)}],
        messages=1 if parent is None else parent.messages + 1,
        chain=chain_key(RAW, {"role": "raw", "content": whole.digest}),
        opening=[],
        grammar={},
    )


def _raw_parent(context: CallContext, tree: Tree, prompt: str | list[int]) -> tuple[Node, str | list[int]] | None:
    """The call that a raw prompt goes on with, and the ids or the text that follows it.

    Ids must begin with the call's ids. A text must begin with the text of the call's ids: what was sampled then stays
    as it was sampled, and only the rest of the text is encoded.
    """
    if not isinstance(prompt, str):
        found = tree.longest_prefix(prompt)
        return None if found is None else (found[0], prompt[found[1] :])
    hit = tree.longest_text(prompt, context.renderer.decode)
    if hit is None:
        return None
    node, length = hit
    return node, prompt[length:]


def _check_vocabulary(ids: Sequence[int], size: int) -> None:
    if not ids:
        raise RequestError(400, "a prompt must have at least one token", code="invalid_prompt", param="prompt")
    bad = next((token for token in ids if not 0 <= token < size), None)
    if bad is not None:
        raise RequestError(
            400, f"token id {bad} is outside the vocabulary of {size}", code="invalid_prompt", param="prompt"
        )


def opening_of(context: CallContext, request: ModelRequest) -> tuple[list[int], Json]:
    """What a forced tool call begins with: ids at the end of the prompt, and the grammar of the rest."""
    if request.tool_choice in ("auto", "none"):
        return [], {}
    tools = request.callable_tools
    assert tools, "dialects refuse a tool_choice that needs tools without them"
    name = request.tool_choice.name if isinstance(request.tool_choice, Named) else None
    opening = renderer_of(context, request).opening(tools, name)
    return opening.ids, opening.grammar


def _behind(parent: Node | None, delta: list[int]) -> TokenIds:
    return (parent.ids if parent is not None else TokenIds()).extended(delta)


def _known(hash: str | None) -> Content | None:
    """What the parent has stored already."""
    return None if hash is None else Content(hash, None)
