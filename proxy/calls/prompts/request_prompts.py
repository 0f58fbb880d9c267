"""The prompts of a request: one for a conversation (`chat_prompts`), one for each raw prompt (`raw_prompts`)."""

from __future__ import annotations

from agentrl.domain.schemas import Role
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.calls.prompts import prompt_lengths
from agentrl.proxy.calls.prompts.chat_prompts import chat_prompt, size_of
from agentrl.proxy.calls.prompts.raw_prompts import raw_prompt
from agentrl.proxy.calls.prompts.rendered_prompt import Prompt
from agentrl.proxy.dialects.model_request import ModelRequest


async def prompts_for(context: CallContext, session_id: str, request: ModelRequest, role: Role | None) -> list[Prompt]:
    """The prompts of a request; `role` is the one that its caller names. Raises RequestError."""
    await context.heavy.run(session_id, size_of(request), prompt_lengths.check, request, context.renderer)
    if request.prompts:
        tree = await context.trees.get(session_id, fresh=True)  # a raw prompt may begin with a call of any replica
        return [await raw_prompt(context, session_id, tree, prompt, role) for prompt in request.prompts]
    return [await chat_prompt(context, session_id, request, role)]
