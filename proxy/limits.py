"""How much a caller may ask for: at once, in one request, in a session, and how long it may take to say it.

    request ─► read_body (413, 408) ─► decode ─► Gate.admit (400, 429, 403) ─► sampled ─► Gate.answered, Admission.close

What is for now is 429 with `Retry-After`. What is for good is 403 `session_limit_reached`: SDKs try 408, 409, 429 and
5xx again, and agents take 400 for a context that is too long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from starlette.requests import Request

from agentrl.config import ProxyConfig
from agentrl.errors import RequestError
from agentrl.proxy.recent import Recent
from agentrl.store import usage

if TYPE_CHECKING:
    from agentrl.proxy.dialects.base import ModelRequest
    from agentrl.proxy.state import ProxyState

MAX_MESSAGES = 20_000
MAX_TOOLS = 2_000
RETRY_AFTER_S = 1.0


def check(asked: ModelRequest) -> None:
    """Raises RequestError 400 for a request with more parts than any agent needs; its bytes are limited before."""
    for param, found, most in (
        ("messages", len(asked.messages), MAX_MESSAGES), ("tools", len(asked.tools or ()), MAX_TOOLS),
    ):  # fmt: skip
        if found > most:
            raise RequestError(400, f"{found} {param}: at most {most} are taken", code="invalid_parameter", param=param)


@dataclass(slots=True)
class _Session:
    """What one session does and has done, as this process knows it."""

    running: int = 0
    calls: int = 0
    tokens: int = 0
    seq: int = -1  # of the store, when it was last heard of
    known: bool = False  # `calls` and `tokens` were read from the store


@dataclass(slots=True)
class Admission:
    """The place of one request, for `answers` answers. Give it back once, by `close` or, if none began, `cancel`."""

    _gate: Gate
    _session: _Session
    answers: int

    def close(self) -> None:
        """The answers are over, however they ended. Closing twice is harmless."""
        answers, self.answers = self.answers, 0
        self._gate.running -= answers
        self._session.running -= answers

    def cancel(self) -> None:
        """The calls never began: they do not count."""
        self._session.calls -= self.answers
        self.close()


@dataclass(slots=True, kw_only=True)
class Gate:
    """Lets calls in while the proxy process and their session have room. Every step is O(1) and does not wait.

    The totals of a session come from the store when the session is first seen, and again whenever a commit shows that
    another replica has served it since. So a session exceeds them by no more than what is under way at that moment, and
    one call for each replica.
    """

    max_running: int
    max_running_of_session: int
    max_calls: int | None = None  # of a session
    max_tokens: int | None = None  # sampled in a session
    running: int = 0
    _sessions: Recent[_Session] = field(default_factory=Recent)

    @classmethod
    def of(cls, config: ProxyConfig) -> Self:
        """The gate of a run's configuration."""
        return cls(
            max_running=config.max_concurrent_calls,
            max_running_of_session=config.max_concurrent_calls_per_session,
            max_calls=config.max_calls_per_session,
            max_tokens=config.max_tokens_per_session,
        )

    async def admit(self, state: ProxyState, session_id: str, answers: int) -> Admission:
        """A place for a request. Asks the store only for a session with limits, seldom.

        Raises RequestError: 400 for more answers than there can ever be room for, 429 while there is none, 403 when the
        session has used up its calls or tokens.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session()
        if not session.known and (self.max_calls is not None or self.max_tokens is not None):
            self._learn(session, await state.read(usage.of_session, session_id))
        self._check(session, answers)
        session.running += answers
        session.calls += answers
        self.running += answers
        return Admission(self, session, answers)

    def answered(self, session_id: str, seq: int, tokens: int) -> None:
        """An answer with so many tokens was committed, as the session's change number `seq`."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.tokens += tokens
        if session.seq >= 0 and seq > session.seq + 1:
            session.known = False  # somebody else has served it meanwhile
        session.seq = max(session.seq, seq)

    def forget(self, session_id: str) -> None:
        """The session has ended."""
        self._sessions.pop(session_id, None)

    def _learn(self, session: _Session, found: usage.Usage) -> None:
        session.calls = max(session.calls, found.calls)
        session.tokens = max(session.tokens, found.tokens)
        session.seq = max(session.seq, found.seq)
        session.known = True

    def _check(self, session: _Session, answers: int) -> None:
        if self.max_calls is not None and session.calls + answers > self.max_calls:
            raise _used_up(f"the session has made {session.calls} of its {self.max_calls} calls")
        if self.max_tokens is not None and session.tokens >= self.max_tokens:
            raise _used_up(f"the session has sampled {session.tokens} of its {self.max_tokens} tokens")
        most = min(self.max_running, self.max_running_of_session)
        if answers > most:
            raise RequestError(
                400, f"{answers} answers in one request: at most {most} are sampled at once", code="invalid_parameter",
                param="n",
            )  # fmt: skip
        if session.running + answers > self.max_running_of_session:
            raise _busy(f"the session has {session.running} calls under way, of {self.max_running_of_session}")
        if self.running + answers > self.max_running:
            raise _busy(f"the proxy has {self.running} calls under way, of {self.max_running}")


def _used_up(message: str) -> RequestError:
    return RequestError(403, message, code="session_limit_reached")


def _busy(message: str) -> RequestError:
    return RequestError(429, message, code="too_many_calls", retry_after_s=RETRY_AFTER_S)


async def read_body(request: Request, state: ProxyState) -> bytes:
    """The request's body. Raises RequestError: 413 when it is, or says that it is, too long; 408 when it is late."""
    max_bytes, timeout_s = state.max_body_bytes, state.body_timeout_s
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:20]) > max_bytes:
        raise _too_large(max_bytes)
    size, parts = 0, []
    try:
        async with asyncio.timeout(timeout_s):
            while (message := await request.receive())["type"] == "http.request":
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        raise RequestError(408, f"the body was not here after {timeout_s:g} s", code="body_timeout") from error
    raise RequestError(499, "the client went away", code="client_closed_request")


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"the body is larger than {limit} bytes", code="body_too_large")
