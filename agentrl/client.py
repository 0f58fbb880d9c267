"""Talk to the agentrl proxy: open a session, run any agent against it, reward it, end it.

    with Client().session(task={"question": "2+2"}) as s:
        answer = my_agent(base_url=s.base_url, api_key=s.api_key)
        s.reward(1.0 if answer == "4" else 0.0)

A session that makes no call for long says `s.heartbeat()` now and then. A sub-agent gets a session of its own,
`with s.child() as sub:`; inside an agent that somebody else started, `Client(base_url, api_key)` with the agent's own
two opens such sessions.

`Client` and `AsyncClient` share every rule: a rule is a generator that yields what it wants done (`_Send`, `_Wait`) and
is driven by a blocking or by an awaiting loop. The proxy may be killed and come back at any moment: connection errors
and 502/503 are retried with the same idempotency key, so that nothing is lost and nothing counts twice. 429 means "not
now" and is waited out.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from agentrl.errors import RequestError, UserError
from agentrl.schemas import Json

RETRIED = frozenset({502, 503})
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 3.0
CALL_TIMEOUT_S = 30.0
LONGEST_ERROR = 2000

T = TypeVar("T")
OnWait = Callable[[float, str], None]
"""Told before every pause: its length in seconds, and what is waited for."""


@dataclass(frozen=True, slots=True)
class _Send:
    method: str
    path: str
    body: Json | None
    repeat_key: str
    api_key: str | None


@dataclass(frozen=True, slots=True)
class _Wait:
    seconds: float
    why: str


_Answer = httpx.Response | httpx.TransportError | None
_Flow = Generator[_Send | _Wait, _Answer, T]


def _call(method: str, path: str, body: Json | None, timeout_s: float, api_key: str | None) -> _Flow[Any]:
    """One logical request: send, wait, send again, until an answer, a refusal, or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    repeat_key = uuid.uuid4().hex
    backoff_s = BACKOFF_FIRST_S
    while True:
        answer = yield _Send(method, path, body, repeat_key, api_key)
        assert answer is not None
        if isinstance(answer, httpx.TransportError):
            problem = RequestError(503, f"the proxy does not answer ({answer!r})", code="connection_error")
        elif answer.is_success:
            return answer.json()
        else:
            problem = _refusal(answer)
            if answer.status_code not in RETRIED and answer.status_code != 429:
                raise problem
        pause_s = max(problem.retry_after_s or 0.0, backoff_s) * random.uniform(1.0, 1.25)
        if time.monotonic() + pause_s > deadline:
            raise problem
        yield _Wait(pause_s, str(problem))
        backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)


def _refusal(answer: httpx.Response) -> RequestError:
    """The error of an answer in OpenAI's shape; any other body is quoted."""
    try:
        error = answer.json()["error"]
        message, code, param = str(error["message"]), str(error.get("code") or error.get("type")), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"HTTP {answer.status_code}: {answer.text[:200]}", "http_error", None
    return RequestError(answer.status_code, message, code=code, param=param, retry_after_s=_retry_after_s(answer))


def _retry_after_s(answer: httpx.Response) -> float | None:
    """How long the proxy asks to wait, by the finer of the two headers that it sends."""
    for header, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return float(answer.headers[header]) * unit_s
        except (KeyError, ValueError):
            continue
    return None


def _reward_body(
    value: float, interaction_id: str | None, scope: str | None, name: str, source: str | None, key: str | None
) -> Json:
    body: Json = {"value": float(value), "name": name, "idempotency_key": key or uuid.uuid4().hex}
    optional = {"interaction_id": interaction_id, "scope": scope, "source": source}
    return body | {k: v for k, v in optional.items() if v is not None}


def _end_body(error: str | None) -> Json:
    return {"status": "completed"} if error is None else {"status": "failed", "error": error}


class _Settings:
    """Where the proxy is and who we are; arguments win over AGENTRL_PROXY_URL and AGENTRL_RUN_KEY.

    A session's own `base_url` and key are taken too: what they open are sub-agents' sessions.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        on_wait: OnWait | None = None,
    ) -> None:
        url, key = base_url or os.environ.get("AGENTRL_PROXY_URL"), api_key or os.environ.get("AGENTRL_RUN_KEY")
        if not url:
            raise UserError("no proxy address: pass base_url or set AGENTRL_PROXY_URL")
        if not key:
            raise UserError("no run key: pass api_key or set AGENTRL_RUN_KEY")
        self.base_url = url.partition("/sessions/")[0].rstrip("/")
        self.timeout_s = timeout_s
        self.on_wait = on_wait
        self._http_args: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {key}"},
            "timeout": CALL_TIMEOUT_S,
        }

    def _request_args(self, send: _Send) -> dict[str, Any]:
        headers = {"Idempotency-Key": send.repeat_key}
        if send.api_key is not None:
            headers["Authorization"] = f"Bearer {send.api_key}"
        return {"method": send.method, "url": send.path, "json": send.body, "headers": headers}

    def _note(self, wait: _Wait) -> None:
        if self.on_wait is not None:
            self.on_wait(wait.seconds, wait.why)


class Client(_Settings):
    """The blocking client. `timeout_s` bounds every call, waiting for admission included."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx.Client(**self._http_args)

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> Any:
        """Send, with the waits and retries of this module, as another key's holder if `api_key` is given.

        Raises RequestError.
        """
        flow = _call(method, path, body, self.timeout_s if timeout_s is None else timeout_s, api_key)
        answer: _Answer = None
        try:
            while True:
                step = flow.send(answer)
                answer = None
                if isinstance(step, _Wait):
                    self._note(step)
                    time.sleep(step.seconds)
                    continue
                try:
                    answer = self._http.request(**self._request_args(step))
                except httpx.TransportError as error:
                    answer = error
        except StopIteration as done:
            return done.value

    def session(
        self, task: Json | None = None, metadata: Json | None = None, *, parent_session_id: str | None = None
    ) -> Session:
        """Open a session when entered; waits for admission. Leaving the block ends it.

        With `parent_session_id` it is a sub-agent's (`Session.child`), and waits for nothing.
        """
        return Session(self, task, metadata, parent_session_id)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Settings):
    """The awaiting client: same rules as `Client`."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx.AsyncClient(**self._http_args, limits=httpx.Limits(max_connections=None))

    async def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None = None,
        api_key: str | None = None,
    ) -> Any:
        """Send, with the waits and retries of this module, as another key's holder if `api_key` is given.

        Raises RequestError.
        """
        flow = _call(method, path, body, self.timeout_s if timeout_s is None else timeout_s, api_key)
        answer: _Answer = None
        try:
            while True:
                step = flow.send(answer)
                answer = None
                if isinstance(step, _Wait):
                    self._note(step)
                    await asyncio.sleep(step.seconds)
                    continue
                try:
                    answer = await self._http.request(**self._request_args(step))
                except httpx.TransportError as error:
                    answer = error
        except StopIteration as done:
            return done.value

    def session(
        self, task: Json | None = None, metadata: Json | None = None, *, parent_session_id: str | None = None
    ) -> AsyncSession:
        """Open a session when entered; waits for admission. Leaving the block ends it.

        With `parent_session_id` it is a sub-agent's (`AsyncSession.child`), and waits for nothing.
        """
        return AsyncSession(self, task, metadata, parent_session_id)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _SessionState:
    """What both sessions know. `base_url` and `api_key` go to any OpenAI-compatible SDK."""

    id: str
    api_key: str
    base_url: str
    group_id: str

    def __init__(self, task: Json | None, metadata: Json | None, parent_session_id: str | None) -> None:
        request = {"task": task, "metadata": metadata, "parent_session_id": parent_session_id}
        self._request = {k: v for k, v in request.items() if v is not None}
        self.ended = False

    def _open(self, answer: Json) -> None:
        self.id, self.api_key = answer["session_id"], answer["api_key"]
        self.base_url, self.group_id = answer["base_url"], answer["group_id"]


def error_text(error: BaseException) -> str:
    """The text of an error for a session's end: short, and always valid to send and to store."""
    return f"{type(error).__name__}: {error}"[:LONGEST_ERROR].encode(errors="replace").decode()


class Session(_SessionState):
    """One agent episode; use as a context manager."""

    def __init__(
        self, client: Client, task: Json | None, metadata: Json | None, parent_session_id: str | None = None
    ) -> None:
        super().__init__(task, metadata, parent_session_id)
        self._client = client

    def _request_as_itself(self, what: str, body: Json | None = None) -> Any:
        return self._client.request("POST", f"/sessions/{self.id}/{what}", body, api_key=self.api_key)

    def reward(
        self,
        value: float,
        interaction_id: str | None = None,
        *,
        scope: str | None = None,
        name: str = "reward",
        source: str | None = None,
        idempotency_key: str | None = None,
    ) -> bool:
        """Reward the session, or one model call by its completion id. False: too late to be trained on.

        `scope="branch"` keeps a call's reward to the path that leads to it. Rewards of several names add up; a later
        one of the same name, call and scope takes the earlier one's place. A repeated `idempotency_key` counts once.
        """
        body = _reward_body(value, interaction_id, scope, name, source, idempotency_key)
        return bool((self._request_as_itself("reward", body))["applied"])

    def heartbeat(self) -> bool:
        """Say that the session is still used; whether it is still open.

        Model calls say so by themselves. An agent that makes none for longer than `proxy.session_timeout_s` (waiting
        for a person, or for a long tool) calls this now and then, or its session is abandoned.
        """
        return bool((self._request_as_itself("heartbeat"))["status"] == "open")

    def child(self, metadata: Json | None = None) -> Session:
        """A sub-agent's session under this one: its own key, URL and rewards, and no wait for admission.

        Unless rewarded itself it inherits this session's return; it ends at the latest with this session.
        """
        return self._client.session(metadata=metadata, parent_session_id=self.id)

    def end(self, error: str | None = None) -> None:
        """End as completed, or as failed with `error`. Only the first call counts."""
        if not self.ended:
            self._request_as_itself("end", _end_body(error))
            self.ended = True

    def __enter__(self) -> Self:
        self._open(self._client.request("POST", "/sessions", self._request))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(None if error is None else error_text(error))


class AsyncSession(_SessionState):
    """One agent episode; use as an async context manager."""

    def __init__(
        self, client: AsyncClient, task: Json | None, metadata: Json | None, parent_session_id: str | None = None
    ) -> None:
        super().__init__(task, metadata, parent_session_id)
        self._client = client

    async def _request_as_itself(self, what: str, body: Json | None = None) -> Any:
        return await self._client.request("POST", f"/sessions/{self.id}/{what}", body, api_key=self.api_key)

    async def reward(
        self,
        value: float,
        interaction_id: str | None = None,
        *,
        scope: str | None = None,
        name: str = "reward",
        source: str | None = None,
        idempotency_key: str | None = None,
    ) -> bool:
        """Reward the session, or one model call by its completion id. False: too late to be trained on.

        `scope="branch"` keeps a call's reward to the path that leads to it. Rewards of several names add up; a later
        one of the same name, call and scope takes the earlier one's place. A repeated `idempotency_key` counts once.
        """
        body = _reward_body(value, interaction_id, scope, name, source, idempotency_key)
        return bool((await self._request_as_itself("reward", body))["applied"])

    async def heartbeat(self) -> bool:
        """Say that the session is still used; whether it is still open.

        Model calls say so by themselves. An agent that makes none for longer than `proxy.session_timeout_s` (waiting
        for a person, or for a long tool) calls this now and then, or its session is abandoned.
        """
        return bool((await self._request_as_itself("heartbeat"))["status"] == "open")

    def child(self, metadata: Json | None = None) -> AsyncSession:
        """A sub-agent's session under this one: its own key, URL and rewards, and no wait for admission.

        Unless rewarded itself it inherits this session's return; it ends at the latest with this session.
        """
        return self._client.session(metadata=metadata, parent_session_id=self.id)

    async def end(self, error: str | None = None) -> None:
        """End as completed, or as failed with `error`. Only the first call counts."""
        if not self.ended:
            await self._request_as_itself("end", _end_body(error))
            self.ended = True

    async def __aenter__(self) -> Self:
        self._open(await self._client.request("POST", "/sessions", self._request))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.end(None if error is None else error_text(error))
