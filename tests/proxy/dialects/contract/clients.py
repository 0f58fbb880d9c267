"""One description for each dialect. The contract runs for all of them."""

from __future__ import annotations

import json
from dataclasses import replace
from operator import attrgetter
from typing import Any

import anthropic
import openai
import pytest

from .client import Client, Said, joined

HELLO = [{"role": "user", "content": "abcd"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
CALC = {"name": "calc", "parameters": SCHEMA}


def openai_sdk(session: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0)


def anthropic_sdk(session: dict[str, Any]) -> anthropic.Anthropic:
    base_url = session["base_url"].removesuffix("/v1")  # the SDK appends it
    return anthropic.Anthropic(base_url=base_url, api_key=session["api_key"], max_retries=0)


# -- Chat Completions and Completions ------------------------------------------------------------------------------


def chat_said(answer: Any) -> Said:
    (choice,) = answer.choices
    tools = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    usage = answer.usage
    text, reason = choice.message.content or "", choice.finish_reason
    return Said(answer.id, text, reason, usage.prompt_tokens, usage.completion_tokens, tools)


def chat_streamed(events: Any) -> Said:
    choices = [choice for event in events for choice in event.choices]
    parts = [part.function for choice in choices for part in choice.delta.tool_calls or []]
    tools = [(parts[0].name, json.loads(joined(part.arguments for part in parts)))] if parts else []
    text, usage = joined(choice.delta.content for choice in choices), events[-1].usage
    return Said(events[0].id, text, choices[-1].finish_reason, usage.prompt_tokens, usage.completion_tokens, tools)


def completion_said(answer: Any) -> Said:
    (choice,), usage = answer.choices, answer.usage
    return Said(answer.id, choice.text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)


def completion_streamed(events: Any) -> Said:
    choices, usage = [choice for event in events for choice in event.choices], events[-1].usage
    text, reason = joined(choice.text for choice in choices), choices[-1].finish_reason
    return Said(events[0].id, text, reason, usage.prompt_tokens, usage.completion_tokens)


CHAT = Client(
    path="/v1/chat/completions",
    prefix="chatcmpl-",
    body={"messages": HELLO},
    create=lambda session: openai_sdk(session).chat.completions.create,
    failure=openai.APIError,
    code=attrgetter("code"),
    read=chat_said,
    read_stream=chat_streamed,
    text_of=lambda event: joined(choice.delta.content for choice in event.choices),
    is_end=lambda event: any(choice.finish_reason for choice in event.choices),
    limit="max_tokens",
    reasons={"stop": "stop", "length": "length", "tool_calls": "tool_calls"},
    stop="stop",
    tool={"type": "function", "function": CALC},
    streaming={"stream_options": {"include_usage": True}},
)
COMPLETIONS = replace(
    CHAT,
    path="/v1/completions",
    prefix="cmpl-",
    body={"prompt": "abcd"},
    create=lambda session: openai_sdk(session).completions.create,
    read=completion_said,
    read_stream=completion_streamed,
    text_of=lambda event: joined(choice.text for choice in event.choices),
    tool=None,
    is_chat=False,
)


# -- Responses -----------------------------------------------------------------------------------------------------


def response_said(answer: Any) -> Said:
    tools = [(item.name, json.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
    reason = answer.incomplete_details.reason if answer.incomplete_details else answer.status
    usage = answer.usage
    return Said(answer.id, answer.output_text, reason, usage.input_tokens, usage.output_tokens, tools)


def response_text(event: Any) -> str:
    return str(event.delta) if event.type == "response.output_text.delta" else ""


def response_streamed(events: Any) -> Said:
    said = response_said(events[-1].response)
    assert said.text == joined(map(response_text, events))
    return said


RESPONSES = Client(
    path="/v1/responses",
    prefix="resp_",
    body={"input": "abcd"},
    create=lambda session: openai_sdk(session).responses.create,
    failure=openai.APIError,
    code=attrgetter("code"),
    read=response_said,
    read_stream=response_streamed,
    text_of=response_text,
    is_end=lambda event: event.type in ("response.function_call_arguments.done", "response.completed"),
    limit="max_output_tokens",
    reasons={"stop": "completed", "length": "max_output_tokens", "tool_calls": "completed"},
    tool={"type": "function", "strict": False, **CALC},
)


# -- Messages ------------------------------------------------------------------------------------------------------


def message_said(answer: Any) -> Said:
    text = joined(block.text for block in answer.content if block.type == "text")
    tools = [(block.name, block.input) for block in answer.content if block.type == "tool_use"]
    return Said(answer.id, text, answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens, tools)


def message_text(event: Any) -> str:
    return event.delta.text if event.type == "content_block_delta" and event.delta.type == "text_delta" else ""


def message_streamed(events: Any) -> Said:
    (begun,) = (event.message for event in events if event.type == "message_start")
    (ended,) = (event for event in events if event.type == "message_delta")
    blocks = [event.content_block for event in events if event.type == "content_block_start"]
    names = [block.name for block in blocks if block.type == "tool_use"]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    written = joined(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    tools = [(name, json.loads(written)) for name in names]
    text = joined(map(message_text, events))
    return Said(begun.id, text, ended.delta.stop_reason, begun.usage.input_tokens, ended.usage.output_tokens, tools)


MESSAGES = Client(
    path="/v1/messages",
    prefix="msg_",
    body={"messages": HELLO, "max_tokens": 50},
    create=lambda session: anthropic_sdk(session).messages.create,
    failure=anthropic.APIStatusError,
    code=attrgetter("error_code"),
    read=message_said,
    read_stream=message_streamed,
    text_of=message_text,
    is_end=lambda event: event.type in ("content_block_stop", "message_delta", "message_stop"),
    limit="max_tokens",
    reasons={"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"},
    stop="stop_sequences",
    tool={"name": "calc", "input_schema": SCHEMA},
)

CLIENTS = {client.dialect.name: client for client in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}


def clients(*, with_field: str | None = None) -> pytest.MarkDecorator:
    """Runs a test for every dialect, or for those whose description has this field."""
    chosen = {name: client for name, client in CLIENTS.items() if with_field is None or getattr(client, with_field)}
    return pytest.mark.parametrize("client", chosen.values(), ids=chosen)
