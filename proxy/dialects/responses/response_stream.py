"""The events of a streamed response.

response.created, response.in_progress
  for each item: output_item.added, its deltas and dones, output_item.done
    reasoning, message: content_part.added, reasoning_text | output_text .delta … .done, content_part.done
    function_call: function_call_arguments.delta … .done
response.completed | response.incomplete | response.failed and error
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.proxy.dialects.event_encoding import sse
from agentrl.proxy.dialects.model_answer import Answer, AnswerDelta, ResponseHeader
from agentrl.proxy.dialects.model_request import ModelRequest
from agentrl.proxy.dialects.openai.chat_output import error_body
from agentrl.proxy.dialects.responses.output_items import (
    NAMES,
    new_item,
    reasoning_fields,
    response_json,
    status_of,
    text_logprobs,
    text_part,
)
from agentrl.proxy.dialects.responses.response_tools import caller_name
from agentrl.rendering import ContentDelta, ReasoningDelta, ToolCallDelta


class ResponsesStream:
    """Encodes an answer as events. One item is open at a time; a delta of another kind or call closes it."""

    def __init__(self, request: ModelRequest, header: ResponseHeader) -> None:
        self._request = request
        self._header = header
        self._sequence = 0
        self._items: list[Json] = []  # the last one is open if `_is_open`
        self._is_open = False
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Json] = []  # of the tokens after the last finished message
        self._streamed = 0  # how many of these were sent in a delta

    def start(self) -> bytes:
        """An empty response."""
        response = response_json(self._request, self._header)
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def push(self, choice: int, part: AnswerDelta) -> bytes:
        """The events of a part of the answer; a text delta has the logprobs of all tokens since the last text delta."""
        if self._request.logprobs:
            self._logprobs += text_logprobs(self._header, part.tokens)
        out = b""
        for delta in part.deltas:
            match delta:
                case ContentDelta(text):
                    out += self._switch("message") + self._message_delta(text)
                case ReasoningDelta(text):
                    out += self._switch("reasoning") + self._delta("reasoning_text.delta", text, content_index=0)
                case ToolCallDelta(_, call_id, name, arguments):
                    if call_id is not None:
                        out += self._close() + self._open("function_call", self._called(call_id, name or ""))
                    if arguments:
                        out += self._delta("function_call_arguments.delta", arguments)
        return out

    def finish(self, choice: int, answer: Answer) -> bytes:
        """The end of the last item. An answer without a message or a call gets an empty message."""
        kinds = {item["type"] for item in self._items}
        empty = b"" if kinds & {"message", "function_call"} else self._switch("message")
        return empty + self._close(status_of(answer))

    def end(self, answers: Sequence[Answer]) -> bytes:
        """The event with the whole response."""
        (answer,) = answers
        response = response_json(self._request, self._header, items=self._items, answer=answer)
        return self._event(response["status"], response=response)

    def error(self, error: RequestError) -> bytes:
        """The failed response, and an error in the two forms that OpenAI sends (nested) and documents (flat)."""
        done = self._items[:-1] if self._is_open else self._items
        failed = self._event("failed", response=response_json(self._request, self._header, items=done, error=error))
        body = error_body(error, NAMES)
        flat = {name: body["error"][name] for name in ("code", "message", "param")}
        return failed + sse({"type": "error", "sequence_number": self._sequence, **flat, **body}, "error")

    def _called(self, call_id: str, name: str) -> Json:
        return {"call_id": call_id, **caller_name(self._request.wire.tools, name)}

    def _switch(self, kind: str) -> bytes:
        """Open an item of this kind, unless one is open."""
        if self._is_open and self._items[-1]["type"] == kind:
            return b""
        part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        return self._close() + self._open(kind) + self._at("content_part.added", content_index=0, part=part)

    def _open(self, kind: str, fields: Json | None = None) -> bytes:
        index = len(self._items)
        item = new_item(kind, self._header, index) | (fields or {})
        self._items.append(item)
        self._is_open = True
        self._text.clear()
        return self._event("output_item.added", output_index=index, item=item)

    def _message_delta(self, text: str) -> bytes:
        new, self._streamed = self._logprobs[self._streamed :], len(self._logprobs)
        return self._delta("output_text.delta", text, content_index=0, logprobs=new)

    def _delta(self, kind: str, text: str, **fields: object) -> bytes:
        self._text.append(text)
        return self._at(kind, delta=text, **fields)

    def _close(self, status: str = "completed") -> bytes:
        """Close the open item, if any."""
        if not self._is_open:
            return b""
        item, text = self._items[-1], "".join(self._text)
        out = b""
        match item["type"]:
            case "message":
                item["content"] = [text_part(text, self._logprobs)]
                out = self._at("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
                self._logprobs, self._streamed = [], 0
            case "reasoning":
                item |= reasoning_fields(self._request, text)
                out = self._at("reasoning_text.done", content_index=0, text=text)
            case "function_call":
                item["arguments"] = text
                out = self._at("function_call_arguments.done", arguments=text, name=item["name"])
        if item["type"] != "function_call":
            out += self._at("content_part.done", content_index=0, part=item["content"][0])
        item["status"] = status
        self._is_open = False
        return out + self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _at(self, kind: str, **fields: object) -> bytes:
        """An event of the open item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(data, name)
