"""Talk to the agentrl proxy: open a session, run any agent against it, reward it, end it.

    with Client().session(task={"question": "2+2"}) as s:
        answer = my_agent(base_url=s.base_url, api_key=s.api_key)
        s.reward(1.0 if answer == "4" else 0.0)

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

T = TypeVar("T")
OnWait = Callable[[float, str], None]
"""Told before every pause: its length in seconds, and what is waited for."""


@dataclass(frozen=True, slots=True)
class _Send:
    method: str
    path: str
    body: Json | None
    key: str


@dataclass(frozen=True, slots=True)
class _Wait:
    seconds: float
    why: str


_Answer = httpx.Response | httpx.TransportError | None
_Flow = Generator[_Send | _Wait, _Answer, T]


def _call(method: str, path: str, body: Json | None, timeout_s: float) -> _Flow[Any]:
    """One logical request: send, wait, send again, until an answer, a refusal, or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    key = uuid.uuid4().hex
    backoff_s = BACKOFF_FIRST_S
    while True:
        answer = yield _Send(method, path, body, key)
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
    try:
        retry_after_s = float(answer.headers["retry-after"])
    except (KeyError, ValueError):
        retry_after_s = None
    return RequestError(answer.status_code, message, code=code, param=param, retry_after_s=retry_after_s)


def _reward_body(value: float, interaction_id: str | None, name: str, source: str | None) -> Json:
    body: Json = {"value": float(value), "name": name, "idempotency_key": uuid.uuid4().hex}
    return body | {k: v for k, v in {"interaction_id": interaction_id, "source": source}.items() if v is not None}


def _end_body(error: str | None) -> Json:
    return {"status": "completed"} if error is None else {"status": "failed", "error": error}


class _Settings:
    """Where the proxy is and who we are; arguments win over AGENTRL_PROXY_URL and AGENTRL_RUN_KEY."""

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
        self.base_url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.on_wait = on_wait
        self._http_args: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {key}"},
            "timeout": CALL_TIMEOUT_S,
        }

    def _request_args(self, send: _Send) -> dict[str, Any]:
        return {"method": send.method, "url": send.path, "json": send.body, "headers": {"Idempotency-Key": send.key}}

    def _note(self, wait: _Wait) -> None:
        if self.on_wait is not None:
            self.on_wait(wait.seconds, wait.why)


class Client(_Settings):
    """The blocking client. `timeout_s` bounds every call, waiting for admission included."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(base_url, api_key, **options)
        self._http = httpx.Client(**self._http_args)

    def request(self, method: str, path: str, body: Json | None = None, *, timeout_s: float | None = None) -> Any:
        """Send, with the waits and retries of this module; raises RequestError."""
        flow = _call(method, path, body, self.timeout_s if timeout_s is None else timeout_s)
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

    def session(self, task: Json | None = None, metadata: Json | None = None) -> Session:
        """Open a session when entered; waits for admission. Leaving the block ends it."""
        return Session(self, task, metadata)

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

    async def request(self, method: str, path: str, body: Json | None = None, *, timeout_s: float | None = None) -> Any:
        """Send, with the waits and retries of this module; raises RequestError."""
        flow = _call(method, path, body, self.timeout_s if timeout_s is None else timeout_s)
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

    def session(self, task: Json | None = None, metadata: Json | None = None) -> AsyncSession:
        """Open a session when entered; waits for admission. Leaving the block ends it."""
        return AsyncSession(self, task, metadata)

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

    def __init__(self, task: Json | None, metadata: Json | None) -> None:
        self._request = {k: v for k, v in {"task": task, "metadata": metadata}.items() if v is not None}
        self.ended = False

    def _open(self, answer: Json) -> None:
        self.id, self.api_key = answer["session_id"], answer["api_key"]
        self.base_url, self.group_id = answer["base_url"], answer["group_id"]


def _error_text(kind: type[BaseException] | None, error: BaseException | None) -> str | None:
    return None if kind is None else f"{kind.__name__}: {error}"


class Session(_SessionState):
    """One agent episode; use as a context manager."""

    def __init__(self, client: Client, task: Json | None, metadata: Json | None) -> None:
        super().__init__(task, metadata)
        self._client = client

    def reward(
        self, value: float, interaction_id: str | None = None, *, name: str = "reward", source: str | None = None
    ) -> bool:
        """Reward the session, or one model call by its completion id. False: too late to be trained on."""
        body = _reward_body(value, interaction_id, name, source)
        return bool(self._client.request("POST", f"/sessions/{self.id}/reward", body)["applied"])

    def end(self, error: str | None = None) -> None:
        """End as completed, or as failed with `error`. Only the first call counts."""
        if not self.ended:
            self._client.request("POST", f"/sessions/{self.id}/end", _end_body(error))
            self.ended = True

    def __enter__(self) -> Self:
        self._open(self._client.request("POST", "/sessions", self._request))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(_error_text(kind, error))


class AsyncSession(_SessionState):
    """One agent episode; use as an async context manager."""

    def __init__(self, client: AsyncClient, task: Json | None, metadata: Json | None) -> None:
        super().__init__(task, metadata)
        self._client = client

    async def reward(
        self, value: float, interaction_id: str | None = None, *, name: str = "reward", source: str | None = None
    ) -> bool:
        """Reward the session, or one model call by its completion id. False: too late to be trained on."""
        body = _reward_body(value, interaction_id, name, source)
        return bool((await self._client.request("POST", f"/sessions/{self.id}/reward", body))["applied"])

    async def end(self, error: str | None = None) -> None:
        """End as completed, or as failed with `error`. Only the first call counts."""
        if not self.ended:
            await self._client.request("POST", f"/sessions/{self.id}/end", _end_body(error))
            self.ended = True

    async def __aenter__(self) -> Self:
        self._open(await self._client.request("POST", "/sessions", self._request))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.end(_error_text(kind, error))
