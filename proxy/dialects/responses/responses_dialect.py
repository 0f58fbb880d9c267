"""OpenAI Responses. Every parameter is supported, ignored without harm, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, bad_parameter, did_you_mean
from agentrl.proxy.dialects.body_decoding import decode_struct
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest, Named, ToolChoice
from agentrl.proxy.dialects.neutral_fields import OF_CHAT, Neutral
from agentrl.proxy.dialects.openai.chat_output import error_body
from agentrl.proxy.dialects.openai.chat_request import thinks_at
from agentrl.proxy.dialects.openai.tool_choices import among, unknown_choice
from agentrl.proxy.dialects.openai.tool_choices import tool_choice as openai_tool_choice
from agentrl.proxy.dialects.parameter_errors import check_neutral, unsupported
from agentrl.proxy.dialects.responses.input_items import messages_of
from agentrl.proxy.dialects.responses.output_items import ENCRYPTED, LOGPROBS, NAMES, output_items, response_json
from agentrl.proxy.dialects.responses.response_request import ResponsesBody, TextOptions
from agentrl.proxy.dialects.responses.response_stream import ResponsesStream
from agentrl.proxy.dialects.responses.response_tools import chat_tools, joined, namespaces_of
from agentrl.proxy.dialects.responses.upstream_responses import read_response_event
from agentrl.proxy.dialects.sampling_fields import format_constraint
from agentrl.proxy.dialects.statuses import for_codex
from agentrl.proxy.dialects.upstream_event import UpstreamEvent

PREVIOUS = re.compile("resp_([0-9a-f]{32})")


NAMESPACES = "namespaces"
"""The key under which a recorded request has its namespaces: its tools are recorded as functions."""


INCLUDED = (LOGPROBS, ENCRYPTED)


OF_BUILT_IN = (
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
"""Values of `include` for built-in tools and images: accepted without effect."""


ONE_MODE = Neutral(("standard",), "the policy reasons as it has learned to")


STORED_APART = ("input", "instructions", "tools", "stream", "stream_options", "client_metadata")
"""Fields that are not recorded with the request's settings: the conversation has them, or the response omits them."""


class OpenAIResponses:
    """POST /v1/responses."""

    name = "openai.responses"
    body: type[msgspec.Struct] = ResponsesBody

    def decode(self, body: bytes) -> ModelRequest:
        """Decode a request. Raises RequestError 400 that names the field at fault."""
        data = decode_struct(body, ResponsesBody)
        _refuse(data)
        tools, left_out = chat_tools(data.tools)
        text = data.text or TextOptions()
        numbers = {"temperature": data.temperature, "top_p": data.top_p}
        return ModelRequest(
            model=data.model,
            messages=_messages(data),
            previous_id=_previous(data.previous_response_id),
            has_instructions=bool(data.instructions),
            tools=tools,
            left_out=left_out,
            tool_choice=tool_choice(data.tool_choice, tools),
            parallel_tool_calls=data.parallel_tool_calls is not False,
            thinks=thinks_at(data.reasoning.effort if data.reasoning else None),
            sampling={name: value for name, value in numbers.items() if value is not None},
            constraint=format_constraint(text.format, "text.format"),
            max_tokens=data.max_output_tokens,
            stream=bool(data.stream),
            logprobs=LOGPROBS in (data.include or ()),
            top_logprobs=data.top_logprobs or 0,
            kept=_kept(data),
            wire=data,
        )

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response."""
        (answer,) = answers
        items = output_items(request, header, answer)
        return orjson.dumps(response_json(request, header, items=items, answer=answer))

    def stream(self, request: ModelRequest, header: ResponseHeader) -> ResponsesStream:
        """An encoder for `response.…` events."""
        return ResponsesStream(request, header)

    def encode_error(self, error: RequestError) -> bytes:
        """An error in OpenAI's shape."""
        return orjson.dumps(error_body(error, NAMES))

    def read_upstream(self, data: Any) -> UpstreamEvent:
        """An answer of another server, or one of its events."""
        return read_response_event(data)

    def status(self, error: RequestError) -> int:
        """The status by which Codex decides whether to retry."""
        return for_codex(error)


def tool_choice(choice: str | Json | None, tools: list[Json] | None) -> ToolChoice:
    """The Responses API's `tool_choice`. Raises RequestError 400."""
    match choice:
        case {"type": "function", "namespace": str(namespace), "name": str(name)}:
            return among(Named(joined(namespace, name)), tools)
        case {"type": "function", "name": str(name)}:
            return among(Named(name), tools)
        case dict():
            raise unknown_choice(choice, '{"type": "function", "name": …}')
    return openai_tool_choice(choice, tools)


def _messages(data: ResponsesBody) -> list[Json]:
    if not data.input:
        raise bad_parameter("input", "input must not be empty")
    user = [{"role": "user", "content": data.input}]
    messages = (
        user if isinstance(data.input, str) else messages_of(data.input, goes_on=data.previous_response_id is not None)
    )
    return [{"role": "system", "content": data.instructions}, *messages] if data.instructions else messages


def _kept(data: ResponsesBody) -> Json:
    """The settings that GET of the response shows beside its conversation."""
    names = (name for name in ResponsesBody.__struct_fields__ if name not in STORED_APART)
    kept = {name: msgspec.to_builtins(value) for name in names if (value := getattr(data, name)) is not None}
    if namespaces := namespaces_of(data.tools):
        kept[NAMESPACES] = namespaces
    return kept


def _previous(value: str | None) -> str | None:
    """The interaction that `previous_response_id` names. Raises RequestError 400, as OpenAI answers."""
    if value is None:
        return None
    found = PREVIOUS.fullmatch(value)
    if found is None:
        raise RequestError(
            400, f"no previous response {value!r}", code="previous_response_not_found", param="previous_response_id"
        )
    return found[1]


def _refuse(data: ResponsesBody) -> None:
    """Raise RequestError 400 for the first unsupported parameter."""
    if data.text is not None:
        check_neutral("text.verbosity", data.text.verbosity, OF_CHAT["verbosity"])
    if data.reasoning is not None:
        check_neutral("reasoning.mode", data.reasoning.mode, ONE_MODE)
    for name in data.include or ():
        if name not in (*INCLUDED, *OF_BUILT_IN):
            raise unsupported("include", f"include {name!r} is not supported{did_you_mean(name, INCLUDED)}")
    if data.top_logprobs and LOGPROBS not in (data.include or ()):
        raise bad_parameter("top_logprobs", f"top_logprobs needs include: [{LOGPROBS!r}]")
