"""Anthropic Messages. Every parameter is supported, ignored without harm, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter
from agentrl.proxy.dialects.anthropic.answer_blocks import content_blocks
from agentrl.proxy.dialects.anthropic.content_blocks import chat_messages
from agentrl.proxy.dialects.anthropic.message_output import error_body, message_json, stop_of, usage_json
from agentrl.proxy.dialects.anthropic.message_request import (
    AdaptiveThinking,
    Choice,
    ChooseAny,
    ChooseAuto,
    ChooseNone,
    ChooseTool,
    CountBody,
    MessagesBody,
    NoThinking,
    ThinkingEnabled,
)
from agentrl.proxy.dialects.anthropic.message_stream import MessagesStream
from agentrl.proxy.dialects.anthropic.message_tools import toolbox
from agentrl.proxy.dialects.anthropic.message_types import (
    AssistantMessage,
)
from agentrl.proxy.dialects.anthropic.upstream_messages import read_message_event
from agentrl.proxy.dialects.body_decoding import decode_struct
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest, Named, ToolChoice
from agentrl.proxy.dialects.openai.tool_choices import among
from agentrl.proxy.dialects.parameter_errors import refuse, unsupported
from agentrl.proxy.dialects.sampling_fields import format_constraint, stops
from agentrl.proxy.dialects.upstream_event import UpstreamEvent

B = TypeVar("B", bound="CountBody")


class AnthropicMessages:
    """POST /v1/messages and /v1/messages/count_tokens."""

    name = "anthropic.messages"
    body: type[msgspec.Struct] = MessagesBody

    def decode(self, body: bytes) -> ModelRequest:
        """Decode a request. Raises RequestError 400 that names the field at fault."""
        data = _decode(body, MessagesBody)
        if data.thread:
            why = "thread is not supported: send the whole conversation"
            raise RequestError(400, why, code="thread_unsupported_request", param="thread")
        numbers = {"temperature": data.temperature, "top_p": data.top_p, "top_k": data.top_k}
        return replace(
            _prompt(data),
            sampling={name: value for name, value in numbers.items() if value is not None},
            max_tokens=data.max_tokens,
            clips=True,
            stop=stops(data.stop_sequences, "stop_sequences"),
            stream=bool(data.stream),
            wire=data,
        )

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response."""
        (answer,) = answers
        content = content_blocks(answer.message, thinking=request.wire.shows_thinking)
        return orjson.dumps(
            message_json(header, content=content, usage=usage_json(header, answer), stop=stop_of(header, answer))
        )

    def stream(self, request: ModelRequest, header: ResponseHeader) -> MessagesStream:
        """An encoder for the events of a message."""
        return MessagesStream(header, thinking=request.wire.shows_thinking)

    def encode_error(self, error: RequestError) -> bytes:
        """An error in Anthropic's shape."""
        return orjson.dumps(error_body(error))

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """An answer of another server, or one of its events."""
        return read_message_event(data)

    def status(self, error: RequestError) -> int:
        """The error's own status."""
        return error.status

    def decode_count(self, body: bytes) -> ModelRequest:
        """Decode a request to count tokens. Raises RequestError as `decode` does."""
        return _prompt(_decode(body, CountBody))

    def encode_count(self, tokens: int) -> bytes:
        """The response with the prompt's length."""
        return orjson.dumps({"input_tokens": tokens})


def _prompt(data: CountBody) -> ModelRequest:
    """The part of a request that its prompt is made of."""
    last = len(data.messages) - 1
    if isinstance(data.messages[last], AssistantMessage):
        why = "is the assistant's: beginning the answer (prefill) is not supported"
        raise unsupported(f"messages[{last}]", f"messages[{last}]: the last message {why}")
    _refuse(data)
    tools = toolbox(data.tools)
    messages = chat_messages(data.system, data.messages, tools)
    loaded = list(tools.loaded.values())
    return ModelRequest(
        model=data.model,
        messages=messages,
        tools=tools.listed or None,
        loaded=loaded,
        left_out=tools.left_out,
        tool_choice=tool_choice(data.tool_choice, [*tools.listed, *loaded]),
        parallel_tool_calls=not getattr(data.tool_choice, "disable_parallel_tool_use", False),
        constraint=_constraint(data),
        thinks=_thinks(data),
    )


def _refuse(data: CountBody) -> None:
    """Raise RequestError 400 for the first unsupported parameter."""
    refuse(
        {
            "compaction": data.compaction is not None and "ask for a summary in a message",
            "container": data.container is not None and "nothing is run for the policy",
            "mcp_servers": bool(data.mcp_servers) and "the agent connects to MCP servers, and sends their tools",
        }
    )
    for i, edit in enumerate((data.context_management and data.context_management.edits) or []):
        if edit.get("type") != "clear_thinking_20251015" or edit.get("keep") not in ("all", {"type": "all"}):
            at = f"context_management.edits[{i}]"
            raise unsupported(at, f"{at} is not supported: agentrl does not edit conversations")


def _thinks(data: CountBody) -> bool | None:
    match data.thinking:
        case ThinkingEnabled() | AdaptiveThinking():
            return True
        case NoThinking():
            return False
    return None


def _constraint(data: CountBody) -> Json:
    """The grammar of the answer, from either of its two parameters."""
    schema = data.output_config.format if data.output_config is not None else None
    if schema is not None and data.output_format is not None:
        raise bad_parameter("output_format", "output_format and output_config.format are the same: give one of them")
    asked = schema or data.output_format
    return format_constraint(None if asked is None else msgspec.to_builtins(asked), "output_config.format")


def tool_choice(choice: Choice | None, tools: list[Json] | None) -> ToolChoice:
    """Anthropic's `tool_choice`. Raises RequestError 400."""
    match choice:
        case None | ChooseAuto():
            return "auto"
        case ChooseNone():
            return "none"
        case ChooseAny():
            return among("required", tools)
        case ChooseTool(name=name):
            return among(Named(name), tools)


def _decode(body: bytes, shape: type[B]) -> B:
    """Decode a body. Raises RequestError as `AnthropicMessages.decode` does."""
    try:
        return decode_struct(body, shape)
    except RequestError as error:
        raise _placed(error) from error.__cause__


def _placed(error: RequestError) -> RequestError:
    """The error with the place of an item of unknown type, and with one code for all invalid messages."""
    place, message = error.param or "", str(error)
    unknown = place.endswith(".type") and "invalid value" in message
    if unknown:
        place = place.removesuffix(".type")
        kind = message.rpartition("invalid value ")[2]
        choices = "; choose auto, any, tool or none" if place == "tool_choice" else ""
        message = f"{place}: the type {kind} is not supported here{choices}"
    if place.startswith(("messages", "system")) and error.code != "invalid_json":
        return RequestError(400, message, code="invalid_messages", param=place)
    return unsupported(place, message) if unknown else error
