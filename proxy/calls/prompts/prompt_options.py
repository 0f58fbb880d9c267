"""How a request's options shape its prompt and the parser of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.domain.schemas import Json
from agentrl.proxy.calls.call_context import CallContext
from agentrl.proxy.dialects.model_request import ModelRequest, Named
from agentrl.rendering import OutputParser, Renderer
from agentrl.rendering.options import with_thinking


def with_thinking_option(context: CallContext, request: ModelRequest) -> ModelRequest:
    """The request with `thinks` among its template options, where the model's format has an option for it."""
    options = with_thinking(request.template_options, request.thinks, context.renderer.thinking_option)
    return replace(request, template_options=options)


def renderer_of(context: CallContext, request: ModelRequest) -> Renderer:
    """The model's renderer with the request's template options. Raises RequestError 400 for an unknown option."""
    options = request.template_options
    return context.renderer.with_options(options) if options else context.renderer


def opening_of(context: CallContext, request: ModelRequest) -> tuple[list[int], Json]:
    """The beginning of a forced tool call: ids at the end of the prompt, and the grammar of the rest."""
    if request.tool_choice in ("auto", "none"):
        return [], {}
    tools = request.callable_tools
    assert tools, "dialects refuse a tool_choice that needs tools without them"
    name = request.tool_choice.name if isinstance(request.tool_choice, Named) else None
    opening = renderer_of(context, request).opening(tools, name)
    return opening.ids, opening.grammar


def parser_after(context: CallContext, request: ModelRequest, before: Sequence[int]) -> OutputParser:
    """The parser of an answer to `before`, a prompt without its opening.

    With tool_choice `none` a tool call is parsed as text.
    """
    if request.prompts:
        return context.renderer.text_parser()
    tools = None if request.tool_choice == "none" else request.callable_tools
    return renderer_of(context, request).parser(tools, before)
