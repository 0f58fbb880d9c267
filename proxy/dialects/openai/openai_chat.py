"""OpenAI Chat Completions.

Every parameter is supported, ignored without harm, or refused by name. In addition to OpenAI's: `top_k`, `min_p`, and
`return_token_ids`, which adds `prompt_token_ids` and, per choice, `token_ids`, `token_logprobs` and `weight_versions`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import orjson

from agentrl.domain.schemas import Json
from agentrl.errors import bad_parameter
from agentrl.proxy.dialects.body_decoding import decode_struct
from agentrl.proxy.dialects.model_answer import Answer, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.openai.chat_output import NAMES, extra_fields, logprobs_of, usage_of
from agentrl.proxy.dialects.openai.chat_request import (
    EXCLUDED,
    ChatBody,
    check_results,
    check_stream_options,
    max_tokens_of,
    thinks_of,
)
from agentrl.proxy.dialects.openai.chat_stream import ChatStream
from agentrl.proxy.dialects.openai.openai_dialect import OpenAIDialect
from agentrl.proxy.dialects.openai.tool_choices import tool_choice
from agentrl.proxy.dialects.parameter_errors import check_neutral
from agentrl.proxy.dialects.sampling_fields import format_constraint, stops
from agentrl.proxy.dialects.tool_results import text_only
from agentrl.rendering.options import check_options
from agentrl.rendering.validation import validate_messages, validate_tools


class OpenAIChat(OpenAIDialect):
    """POST /v1/chat/completions."""

    name = "openai.chat"
    body: type[msgspec.Struct] = ChatBody
    parameter_names = NAMES

    def decode(self, body: bytes) -> ModelRequest:
        """Decode a request. Raises RequestError 400 that names the field at fault."""
        data = decode_struct(body, ChatBody)
        check_stream_options(data.stream_options)
        if data.reasoning is not None:
            check_neutral("reasoning.exclude", data.reasoning.exclude, EXCLUDED)
        messages = text_only(data.messages)
        validate_messages(messages)
        check_results(messages)
        validate_tools(data.tools)
        if data.top_logprobs and not data.logprobs:
            raise bad_parameter("top_logprobs", "top_logprobs needs logprobs: true")
        return ModelRequest(
            model=data.model,
            messages=messages,
            tools=data.tools or None,
            tool_choice=tool_choice(data.tool_choice, data.tools),
            parallel_tool_calls=data.parallel_tool_calls is not False,
            template_options=check_options(data.chat_template_kwargs),
            thinks=thinks_of(data),
            sampling=data.sampling(),
            constraint=format_constraint(data.response_format, "response_format", nested="json_schema"),
            seed=data.seed,
            max_tokens=max_tokens_of(data),
            stop=stops(data.stop),
            n=data.n or 1,
            stream=bool(data.stream),
            logprobs=bool(data.logprobs),
            top_logprobs=data.top_logprobs or 0,
            wire=data,
        )

    def encode(self, request: ModelRequest, header: ResponseHeader, answers: Sequence[Answer]) -> bytes:
        """The whole response."""
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            choice: Json = {
                "index": index,
                "message": {"reasoning_content": None, **answer.message},
                "finish_reason": answer.finish_reason,
                "logprobs": logprobs_of(header, answer.tokens) if request.logprobs else None,
            }
            choices.append(choice | extra_fields(request, answer))
        body: Json = {
            "id": f"chatcmpl-{header.id}",
            "object": "chat.completion",
            "created": header.created,
            "model": header.model,
            "choices": choices,
            "usage": usage_of(header, answers),
        }
        if request.wire.return_token_ids:
            body["prompt_token_ids"] = list(answers[0].prompt_ids)
        return orjson.dumps(body)

    def stream(self, request: ModelRequest, header: ResponseHeader) -> ChatStream:
        """An encoder for `chat.completion.chunk` events."""
        return ChatStream(request, header)
