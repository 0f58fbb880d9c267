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

from agentrl.configs.proxy_config import ProxyConfig
from agentrl.errors import RequestError
from agentrl.proxy.recent import Recent
from agentrl.store.sessions import session_usage

if TYPE_CHECKING:
    from agentrl.proxy.dialects.dialect import ModelRequest
    from agentrl.proxy.state import ProxyState

MAX_MESSAGES = 20_000
MAX_TOOLS = 2_000
RETRY_AFTER_S = 1.0


def check(asked: ModelRequest) -> None:
    """Raises RequestError 400 for a request with more parts than any agent needs; its bytes are limited before."""
    for param, found, most in (
        ("messages", len(asked.messages), MAX_MESSAGES),
        ("tools", len(asked.tools or ()), MAX_TOOLS),
    ):
        if found > most:
            raise RequestError(400, f"{found} {param}: at most {most} are taken", code="invalid_parameter", param=param)


@dataclass(slots=True)
class _Tree:
    """What a root session and its sub-agents' sessions do, and have begun, as this process knows it."""

    running: int = 0
    calls: int = 0


@dataclass(slots=True)
class Admission:
    """The place of one request, for `answers` answers. Give it back once, by `close` or, if none began, `cancel`."""

    _gate: Gate
    _tree: _Tree
    answers: int

    def close(self) -> None:
        """The answers are over, however they ended. Closing twice is harmless."""
        answers, self.answers = self.answers, 0
        self._gate.running -= answers
        self._tree.running -= answers

    def cancel(self) -> None:
        """The calls never began: they do not count."""
        self._tree.calls -= self.answers
        self.close()


@dataclass(slots=True, kw_only=True)
class Gate:
    """Lets calls in while the proxy process and their session have room.

    A sub-agent's session counts for the root that it stands under. What a root has used is read from the store at each
    call, where calls or tokens are limited; nothing is read elsewhere. So a session exceeds its limits by no more than
    what is under way at that moment.
    """

    max_running: int
    max_running_of_session: int
    max_calls: int | None = None  # of a session
    max_tokens: int | None = None  # sampled in a session
    running: int = 0
    _trees: Recent[_Tree] = field(default_factory=Recent)

    @classmethod
    def of(cls, config: ProxyConfig) -> Self:
        """The gate of a run's configuration."""
        return cls(
            max_running=config.max_concurrent_calls,
            max_running_of_session=config.max_concurrent_calls_per_session,
            max_calls=config.max_calls_per_session,
            max_tokens=config.max_tokens_per_session,
        )

    async def admit(self, state: ProxyState, root_id: str, answers: int, *, samples: bool = True) -> Admission:
        """A place for a request of a session that stands under this root, or is it.

        One that `samples` nothing takes a place, and none of the session's calls: `close` it, do not `cancel` it.

        Raises RequestError: 400 for more answers than there can ever be room for, 429 while there is none, 403 when the
        session has used up its calls or tokens.
        """
        used = None
        if samples and (self.max_calls is not None or self.max_tokens is not None):
            used = await state.read(session_usage.of_tree, root_id)
        tree = self._trees.get(root_id)
        if tree is None:
            tree = self._trees[root_id] = _Tree()
        if used is not None:
            tree.calls = max(tree.calls, used.calls)
        if samples:
            self._check_totals(tree, used.tokens if used is not None else 0, answers)
        self._check_room(tree, answers)
        tree.running += answers
        tree.calls += answers if samples else 0
        self.running += answers
        return Admission(self, tree, answers)

    def forget(self, root_id: str) -> None:
        """The session has ended."""
        self._trees.pop(root_id, None)

    def _check_totals(self, tree: _Tree, tokens: int, answers: int) -> None:
        if self.max_calls is not None and tree.calls + answers > self.max_calls:
            raise _used_up(f"the session has made {tree.calls} of its {self.max_calls} calls")
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise _used_up(f"the session has sampled {tokens} of its {self.max_tokens} tokens")

    def _check_room(self, tree: _Tree, answers: int) -> None:
        most = min(self.max_running, self.max_running_of_session)
        if answers > most:
            raise RequestError(
                400,
                f"{answers} answers in one request: at most {most} are sampled at once",
                code="invalid_parameter",
                param="n",
            )
        if tree.running + answers > self.max_running_of_session:
            raise _busy(f"the session has {tree.running} calls under way, of {self.max_running_of_session}")
        if self.running + answers > self.max_running:
            raise _busy(f"the proxy has {self.running} calls under way, of {self.max_running}")


def _used_up(message: str) -> RequestError:
    return RequestError(403, message, code="session_limit_reached")


def _busy(message: str) -> RequestError:
    return RequestError(429, message, code="too_many_calls", retry_after_s=RETRY_AFTER_S)


async def read_body(request: Request, state: ProxyState, most: int | None = None) -> bytes:
    """The request's body. Raises RequestError: 413 when it is, or says that it is, too long; 408 when it is late."""
    max_bytes, timeout_s = min(state.max_body_bytes, most or state.max_body_bytes), state.body_timeout_s
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
