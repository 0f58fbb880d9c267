"""Builds the client's requests, parses the responses, and implements the retry rule. Performs no I/O.

The retry rule is custom: a pause comes from the proxy's two Retry-After headers, is reported to `on_wait` beforehand,
and ends with the proxy's error when the deadline is near. tenacity provides none of these.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from agentrl.domain import answer_text
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, UserError

RETRIED = frozenset({429, 502, 503})
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 3.0
CALL_TIMEOUT_S = 30.0
LONGEST_ERROR = 2000

OnWait = Callable[[float, str], None]
"""Called before each pause, with its length in seconds and the reason."""


class Settings:
    """The proxy's URL and the key of the calls.

    Arguments take precedence over AGENTRL_PROXY_URL and AGENTRL_RUN_KEY. A session's `base_url` and key are also valid;
    they can open sub-agent sessions.
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
        self._http_arguments: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {key}"},
            "timeout": CALL_TIMEOUT_S,
            "limits": httpx.Limits(max_connections=None),
        }


class Retries:
    """The pauses between the attempts of a call, until its deadline."""

    def __init__(self, timeout_s: float, on_wait: OnWait | None) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._backoff_s = BACKOFF_FIRST_S
        self._on_wait = on_wait

    def pause_s(self, problem: RequestError) -> float:
        """Seconds until the next attempt. Raises `problem` when it is final or the deadline is too near."""
        pause_s = max(problem.retry_after_s or 0.0, self._backoff_s) * random.uniform(1.0, 1.25)
        if problem.status not in RETRIED or time.monotonic() + pause_s > self._deadline:
            raise problem
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
        if self._on_wait is not None:
            self._on_wait(pause_s, str(problem))
        return pause_s


class SessionState:
    """The attributes of a session. Pass `base_url` and `api_key` to any OpenAI-compatible SDK."""

    id: str
    api_key: str
    base_url: str
    group_id: str

    sample_index: int

    def __init__(self, request: Json) -> None:
        self._request = {k: v for k, v in request.items() if v is not None}
        self.ended = False

    def _open(self, answer: Json) -> None:
        self.id, self.api_key = answer["session_id"], answer["api_key"]
        self.base_url, self.group_id = answer["base_url"], answer["group_id"]
        self.sample_index = answer["sample_index"]


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers of a call, equal in all attempts. `api_key` replaces the client's key."""
    return {"Idempotency-Key": uuid.uuid4().hex} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})


def unanswered(error: httpx.TransportError) -> RequestError:
    """The error of an attempt without a response."""
    return RequestError(503, f"the proxy does not answer ({error!r})", code="connection_error")


def refusal(answer: httpx.Response) -> RequestError:
    """The error of a response in OpenAI's format; other bodies are quoted."""
    try:
        error = answer.json()["error"]
        message, code, param = str(error["message"]), str(error.get("code") or error.get("type")), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code, param = f"HTTP {answer.status_code}: {answer.text[:200]}", "http_error", None
    return RequestError(answer.status_code, message, code=code, param=param, retry_after_s=_retry_after_s(answer))


def _retry_after_s(answer: httpx.Response) -> float | None:
    """The proxy's requested pause, from the more precise of its two headers."""
    for header, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return float(answer.headers[header]) * unit_s
        except (KeyError, ValueError):
            continue
    return None


def reward_body(
    value: float, interaction_id: str | None, scope: str | None, name: str, source: str | None, key: str | None
) -> Json:
    """The request body of a reward; generates an idempotency key when `key` is None."""
    body: Json = {"value": float(value), "name": name, "idempotency_key": key or uuid.uuid4().hex}
    optional = {"interaction_id": interaction_id, "scope": scope, "source": source}
    return body | {k: v for k, v in optional.items() if v is not None}


def end_body(
    error: str | None,
    answer: str | float | None = None,
    stats: Mapping[str, float] | None = None,
    *,
    truncated: bool = False,
) -> Json:
    """The request body that ends a session: completed, with its `answer`, or failed with `error`."""
    kept = answer_text.bounded(answer)
    completed: Json = {"status": "completed"} if kept is None else {"status": "completed", "answer": kept}
    body: Json = completed if error is None else {"status": "failed", "error": error}
    return body | ({"stats": dict(stats)} if stats else {}) | ({"truncated": True} if truncated else {})


def error_text(error: BaseException) -> str:
    """Format an error for the end of a session: short, and valid UTF-8."""
    return f"{type(error).__name__}: {error}"[:LONGEST_ERROR].encode(errors="replace").decode()
