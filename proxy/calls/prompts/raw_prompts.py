"""The prompt of a Completions call: text or ids, and the recorded call that they begin with.

text or ids ─► recorded call whose tokens begin them ─► parent's tokens + the rest, encoded
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from agentrl.domain.schemas import Role
from agentrl.errors import RequestError
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.prompts.fork_rules import Place, raw_place
from agentrl.proxy.calls.prompts.rendered_prompt import Prompt, sequence_of, stored
from agentrl.proxy.calls.token_tree import Tree
from agentrl.rendering.conversation import chain_key, root_key
from agentrl.store.calls.call_tree import Node

RAW = root_key(None, {"raw": True})
"""The root of the keys of raw prompts. No conversation has such keys."""


async def raw_prompt(
    context: CallContext, session_id: str, tree: Tree, prompt: str | list[int], role: Role | None
) -> Prompt:
    """The prompt of one text or of one list of ids. Raises RequestError 400."""
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
    whole = sequence_of(parent, delta)
    return Prompt(
        token_ids=whole,
        delta_ids=delta,
        parent=parent,
        fork_reason=found.reason,
        role=found.role,
        system=stored(parent.system_hash) if parent is not None else None,
        tools=stored(parent.tools_hash) if parent is not None else None,
        new_messages=[{"role": "raw", "content": text if parent is None else context.renderer.decode(delta)}],
        messages=1 if parent is None else parent.messages + 1,
        chain=chain_key(RAW, {"role": "raw", "content": whole.digest}),
        opening=[],
        grammar={},
    )


def _raw_parent(context: CallContext, tree: Tree, prompt: str | list[int]) -> tuple[Node, str | list[int]] | None:
    """The call that a raw prompt extends, and the ids or the text after it.

    Ids must begin with the call's ids. A text must begin with the text of the call's ids: the sampled ids are kept, and
    only the rest of the text is encoded.
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
