"""A streamed Chat Completions call of an episode, which is recorded like one that is not streamed.

    create(stream=True) ─► first chunk ─► the call has its id, and can be rewarded
    async for chunk     ─► …           ─► the last chunk: the call has its response

An agent may stop reading at any time: `read_rest` reads what is left, so that the whole answer is delivered and trains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from openai import AsyncStream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from agentrl.errors import AgentRLError


class StreamedCall:
    """The chunks of one answer, as `AsyncStream` gives them. `done` gets the whole answer, or None after an error."""

    def __init__(self, stream: AsyncStream[ChatCompletionChunk], done: Callable[[ChatCompletion | None], None]) -> None:
        self._stream, self._done = stream, done
        self._read: list[ChatCompletionChunk] = []
        self._ahead: ChatCompletionChunk | None = None
        self._open = True

    @property
    def response(self) -> Any:
        """The HTTP response."""
        return self._stream.response

    async def first(self) -> ChatCompletionChunk:
        """The first chunk, which iteration gives again. Raises AgentRLError for a stream without chunks."""
        self._ahead = await self._next()
        if self._ahead is None:
            raise AgentRLError("ArealOpenAI: the proxy closed the stream of a call without a chunk")
        return self._ahead

    async def __anext__(self) -> ChatCompletionChunk:
        chunk, self._ahead = self._ahead, None
        chunk = chunk or await self._next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __aiter__(self) -> AsyncIterator[ChatCompletionChunk]:
        return self

    async def read_rest(self) -> None:
        """Read the chunks that are left."""
        async for _ in self:
            pass

    async def close(self) -> None:
        """The same: an answer that its agent does not read to the end is recorded whole."""
        await self.read_rest()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self) -> ChatCompletionChunk | None:
        if not self._open:
            return None
        try:
            chunk = await anext(self._stream, None)
        except BaseException:
            self._open = False
            self._done(None)
            await self._stream.close()
            raise
        if chunk is None:
            self._open = False
            if self._read:
                self._done(whole(self._read))
        else:
            self._read.append(chunk)
        return chunk


def whole(chunks: Sequence[ChatCompletionChunk]) -> ChatCompletion:
    """The answer that chunks make up."""
    choices: dict[int, dict[str, Any]] = {}
    texts: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    calls: dict[int, dict[int, dict[str, Any]]] = defaultdict(dict)
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"index": part.index, "finish_reason": None})
            choice |= {key: value for key, value in part.to_dict().items() if key != "delta" and value is not None}
            for name, value in part.delta.to_dict().items():
                if isinstance(value, str) and name != "role":
                    texts[part.index][name].append(value)
            for call in part.delta.tool_calls or ():
                known = calls[part.index].setdefault(call.index, {"id": None, "name": "", "arguments": []})
                known["id"] = call.id or known["id"]
                if call.function is not None:
                    known["name"] += call.function.name or ""
                    known["arguments"].append(call.function.arguments or "")
    for index, choice in choices.items():
        message: dict[str, Any] = {"role": "assistant", "content": None}
        message |= {name: "".join(parts) or None for name, parts in texts[index].items()}
        if of_choice := calls.get(index):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["arguments"])},
                }
                for _, call in sorted(of_choice.items())
            ]
        choice["message"] = message
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None)
    return ChatCompletion.model_validate(
        {
            "id": chunks[0].id,
            "object": "chat.completion",
            "created": chunks[0].created,
            "model": chunks[0].model,
            "choices": [choices[index] for index in sorted(choices)],
            "usage": usage,
        }
    )
