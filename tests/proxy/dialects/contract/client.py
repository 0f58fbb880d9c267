"""A dialect as the contract uses it: the requests of its SDK, and readers of its answers and events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl.errors import RequestError
from agentrl.proxy.dialects import DIALECTS, Dialect


@dataclass
class Said:
    """An answer, in the words that every dialect has."""

    id: str
    text: str
    reason: str | None
    prompt_tokens: int
    output_tokens: int
    tools: list[tuple[str, Any]] = field(default_factory=list)
    """The tool calls: name and arguments."""


@dataclass(frozen=True)
class Client:
    """A dialect, seen by the SDK of its API."""

    path: str
    """Its key in `DIALECTS`."""
    prefix: str
    """The prefix of its answers' ids."""
    body: dict[str, Any]
    """The least body that it takes. The prompt is `abcd`."""
    create: Callable[[dict[str, Any]], Callable[..., Any]]
    """The method of the SDK that sends a request of this session."""
    failure: type[Exception]
    """The base class of the SDK's errors."""
    code: Callable[[Any], str | None]
    """The code in an error of the SDK."""
    read: Callable[[Any], Said]
    read_stream: Callable[[Sequence[Any]], Said]
    text_of: Callable[[Any], str]
    """The text in an event of a stream."""
    is_end: Callable[[Any], bool]
    """Whether an event ends an answer or a tool call. Such events follow the commit."""
    limit: str
    """The parameter that limits the tokens of an answer."""
    reasons: dict[str, str]
    """Its finish reasons, by those of the engine: `stop`, `length`, and `tool_calls` if it has tools."""
    stop: str | None = None
    """The parameter with the stop strings."""
    tool: dict[str, Any] | None = None
    """The tool `calc`, whose argument `x` is a string."""
    is_chat: bool = True
    """Whether the prompt is a conversation. Otherwise it is sampled as it stands."""
    streaming: dict[str, Any] = field(default_factory=dict)
    """What a streamed request asks for to get its usage."""

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.path]

    def decode(self, **fields: Any) -> Any:
        """The request of the least body with further fields."""
        return self.dialect.decode(json.dumps({"model": "m", **self.body, **fields}).encode())

    def refusal(self, **fields: Any) -> RequestError:
        """The error that such a request raises."""
        with pytest.raises(RequestError) as caught:
            self.decode(**fields)
        return caught.value

    def ask(self, session: dict[str, Any], *, stream: bool = False, **fields: Any) -> Any:
        """The SDK's answer, or its events."""
        asked = {"model": "test", **self.body} | (self.streaming if stream else {})
        return self.create(session)(**asked, stream=stream, extra_body=fields)

    def answer(self, session: dict[str, Any], *, stream: bool = False, **fields: Any) -> Said:
        answered = self.ask(session, stream=stream, **fields)
        return self.read_stream(list(answered)) if stream else self.read(answered)

    def status(self, status: int, code: str) -> int:
        """The HTTP status of an error for clients of this dialect."""
        return self.dialect.status(RequestError(status, "", code=code))


def joined(texts: Iterable[str | None]) -> str:
    return "".join(text or "" for text in texts)
