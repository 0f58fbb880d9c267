"""Calls of the trainer and of agents around a turn on the engines' GPUs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.testing import Reply

ADMIN = {"Authorization": "Bearer admin-key"}
HELLO = [{"role": "user", "content": "hi"}]
NEWLINE, LETTER, LENGTH = 201, 67, 24  # ids of the tiny model
SENTENCE = "abcdefghijklmnopqrstuvwx"
EVERYTHING = {"kv_cache", "weights"}


def states(proxy: Any) -> list[str]:
    return [engine["state"] for engine in proxy.get("/api/engines")]


def serves(proxy: Any, version: int) -> bool:
    return [(e["state"], e["version"]) for e in proxy.get("/api/engines")] == [("serving", version)]


def release(proxy: Any, epoch: int, lease_s: float = 60.0) -> Any:
    return proxy.post("/api/engines/release", {"epoch": epoch, "lease_s": lease_s}, headers=ADMIN)


def reload(proxy: Any, epoch: int) -> Any:
    return proxy.post("/api/engines/reload", {"epoch": epoch}, headers=ADMIN)


def publish(proxy: Any, version: int, epoch: int | None) -> Any:
    return proxy.post("/admin/publish", {"version": version, "epoch": epoch}, headers=ADMIN)


def ask(proxy: Any, session: Json) -> str:
    answer = proxy.sdk(session).chat.completions.create(model="test", messages=HELLO)
    return str(answer.choices[0].message.content)


def spans(proxy: Any, session: Json) -> list[list[int]]:
    (call,) = proxy.calls(session)
    return [list(span) for span in call["version_spans"]]


def half_answered(proxy: Any, beside: ThreadPoolExecutor, until: Callable[..., Any]) -> tuple[Json, Future[str]]:
    """A call whose engine has sampled seven tokens, and waits."""
    proxy.engine.enqueue(Reply(range(LETTER, LETTER + LENGTH), hold_after=7, finish_reason="length"))
    session = proxy.session()
    answer = beside.submit(ask, proxy, session)
    until(lambda: proxy.engine.holding == 1)
    return session, answer
