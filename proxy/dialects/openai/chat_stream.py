"""The events of a streamed Chat Completions answer."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.event_encoding import sse
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.openai.chat_output import NAMES, delta_json, error_body, extra_fields, logprobs_of, usage_of


class ChatStream:
    """Encodes an answer as chunks. A choice's first chunk has the role, its last one the finish reason."""

    def __init__(self, request: ModelRequest, header: ResponseHeader) -> None:
        self._request = request
        self._header = header

    def start(self) -> bytes:
        """An empty assistant message for every choice."""
        empty = {"role": "assistant", "content": "", "reasoning_content": None}
        return b"".join(sse(self._chunk(index, empty)) for index in range(self._request.choices))

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """A chunk for every delta; the first has the logprobs of the tokens."""
        asked = self._request.logprobs and len(part.tokens.ids) > 0
        logprobs = logprobs_of(self._header, part.tokens) if asked else None
        deltas = [delta_json(delta) for delta in part.deltas] or [{}] * asked
        out = b""
        for delta in deltas:
            out += sse(self._chunk(choice, delta, logprobs=logprobs))
            logprobs = None
        return out

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The chunk with the finish reason."""
        chunk = self._chunk(choice, {}, answer.finish_reason)
        chunk["choices"][0] |= extra_fields(self._request, answer)
        if self._request.wire.return_token_ids:
            chunk["prompt_token_ids"] = list(answer.prompt_ids)
        return sse(chunk)

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The usage, if requested, and `[DONE]`."""
        options, openrouter = self._request.wire.stream_options, self._request.wire.usage
        usage = b""
        if (options is not None and options.include_usage) or (openrouter is not None and openrouter.include):
            usage = sse(self._chunk(0, {}) | {"choices": [], "usage": usage_of(self._header, answers)})
        return usage + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        """An error event, without `[DONE]`."""
        return sse(error_body(error, NAMES))

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None, logprobs: Json | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": finish_reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return {
            "id": f"chatcmpl-{self._header.id}",
            "object": "chat.completion.chunk",
            "created": self._header.created,
            "model": self._header.model,
            "choices": [choice],
        }
