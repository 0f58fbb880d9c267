"""The events of a streamed message: content blocks in order, each with a start, deltas and a stop."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.anthropic.answer_blocks import object_text
from agentrl.proxy.dialects.anthropic.message_output import error_body, message_json, stop_of, usage_json
from agentrl.proxy.dialects.event_encoding import sse
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader
from agentrl.rendering import ContentDelta, Delta, ReasoningDelta, ToolCallDelta

_EMPTY: dict[str, Json] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class MessagesStream:
    """Streams thinking and text as they are generated, and a tool call's input as one delta when it is complete."""

    def __init__(self, header: ResponseHeader, *, thinking: bool) -> None:
        self._header = header
        self._thinking = thinking
        self._started = 0  # content blocks so far
        self._open: str | int | None = None  # the open block: "thinking", "text", or a tool call's index
        self._arguments = ""  # of the open tool call

    def start(self) -> bytes:
        """The empty message."""
        usage = {
            "input_tokens": self._header.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        return _event("message_start", message=message_json(self._header, content=[], usage=usage))

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """Deltas of the open block; another kind of delta starts another block."""
        return b"".join(self._delta(delta) for delta in part.deltas)

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The end of the last block, the stop reason and the usage."""
        out = b"" if self._started else self._start("text", _EMPTY["text"])
        return (
            out
            + self._stop()
            + _event("message_delta", delta=stop_of(self._header, answer), usage=usage_json(self._header, answer))
        )

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The last event."""
        return _event("message_stop")

    def error(self, error: RequestError) -> bytes:
        """An error event; the open block is not closed."""
        return sse(error_body(error), "error")

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta(text):
                out = self._start("thinking", _EMPTY["thinking"])
                return out + (self._fill({"type": "thinking_delta", "thinking": text}) if self._thinking else b"")
            case ContentDelta(text):
                return self._start("text", _EMPTY["text"]) + self._fill({"type": "text_delta", "text": text})
            case ToolCallDelta(index, call_id, name, arguments):
                out = self._start(index, {"type": "tool_use", "id": call_id, "name": name, "input": {}})
                self._arguments += arguments
                return out

    def _start(self, block: str | int, empty: Json) -> bytes:
        """Close the open block and open `block`, unless it is open already."""
        if self._open == block:
            return b""
        out = self._stop()
        self._open, self._arguments = block, ""
        self._started += 1
        return out + _event("content_block_start", index=self._started - 1, content_block=empty)

    def _fill(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._started - 1, delta=delta)

    def _stop(self) -> bytes:
        """Close the open block, if any."""
        last = b""
        if self._open is None:
            return last
        if self._open == "thinking":
            last = self._fill({"type": "signature_delta", "signature": ""})
        elif self._open != "text":
            last = self._fill({"type": "input_json_delta", "partial_json": object_text(self._arguments)})
        self._open = None
        return last + _event("content_block_stop", index=self._started - 1)


def _event(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, kind)
