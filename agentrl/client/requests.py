"""What the client sends to the proxy, and how it reads the answers; without sending anything.

The retry rule is our own: a pause comes from the proxy's two Retry-After headers, is reported to `on_wait` before it
begins, and ends in the proxy's own error when the deadline is near. tenacity would leave each of these to be written.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import httpx

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, UserError

RETRIED = frozenset({429, 502, 503})
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 3.0
CALL_TIMEOUT_S = 30.0
LONGEST_ERROR = 2000

OnWait = Callable[[float, str], None]
"""Called before every pause with its length in seconds and the reason."""


class Settings:
    """Where the proxy is and with which key it is called.

    Arguments win over AGENTRL_PROXY_URL and AGENTRL_RUN_KEY. A session's own `base_url` and key are taken too: they
    open sub-agents' sessions.
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
    """The pauses between the attempts of one call, until its deadline."""

    def __init__(self, timeout_s: float, on_wait: OnWait | None) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._backoff_s = BACKOFF_FIRST_S
        self._on_wait = on_wait

    def pause_s(self, problem: RequestError) -> float:
        """Seconds to wait before the next attempt. Raises `problem` when it is final, or the deadline is too near."""
        pause_s = max(problem.retry_after_s or 0.0, self._backoff_s) * random.uniform(1.0, 1.25)
        if problem.status not in RETRIED or time.monotonic() + pause_s > self._deadline:
            raise problem
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)
        if self._on_wait is not None:
            self._on_wait(pause_s, str(problem))
        return pause_s


class SessionState:
    """What a session knows. `base_url` and `api_key` go to any OpenAI-compatible SDK."""

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


def headers_of(api_key: str | None) -> dict[str, str]:
    """The headers of one call, the same in every attempt; `api_key` replaces the client's own key."""
    return {"Idempotency-Key": uuid.uuid4().hex} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})


def unanswered(error: httpx.TransportError) -> RequestError:
    """The error of an attempt that got no answer."""
    return RequestError(503, f"the proxy does not answer ({error!r})", code="connection_error")


def refusal(answer: httpx.Response) -> RequestError:
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


def reward_body(
    value: float, interaction_id: str | None, scope: str | None, name: str, source: str | None, key: str | None
) -> Json:
    """The body of a reward; without a `key` of the caller's it gets one."""
    body: Json = {"value": float(value), "name": name, "idempotency_key": key or uuid.uuid4().hex}
    optional = {"interaction_id": interaction_id, "scope": scope, "source": source}
    return body | {k: v for k, v in optional.items() if v is not None}


def end_body(error: str | None) -> Json:
    """The body of a session's end: completed, or failed with `error`."""
    return {"status": "completed"} if error is None else {"status": "failed", "error": error}


def error_text(error: BaseException) -> str:
    """The text of an error for a session's end: short, and always valid to send and to store."""
    return f"{type(error).__name__}: {error}"[:LONGEST_ERROR].encode(errors="replace").decode()
