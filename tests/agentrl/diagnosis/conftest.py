"""Real proxies and databases, as in tests/proxy; only the model is scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from borrowed import proxy_fixtures

from agentrl.diagnosis import report, sources
from agentrl.diagnosis.report import Report

_shared = proxy_fixtures("diagnosis_proxy_conftest")
database_kind, run_config, store_url, proxy, second = (
    getattr(_shared, name) for name in ("database_kind", "run_config", "store_url", "proxy", "second")
)


@pytest.fixture
def examine(proxy: Any) -> Callable[[Any], Report]:
    """The report on a session of the proxy, read from its store."""

    def read(session: Any) -> Report:
        found, _ = sources.from_store(proxy.database, session["session_id"])
        return report.make(found, proxy.renderer.decode)

    return read


@pytest.fixture
def ask(proxy: Any) -> Callable[..., dict[str, Any]]:
    """One call of the model, answered with `says`; returns its message."""

    def call(session: Any, messages: Any, says: str = "fine", tools: Any = None, **options: Any) -> dict[str, Any]:
        proxy.engine.enqueue(proxy.says(says))
        more = {"tools": tools} if tools else {}
        reply = proxy.sdk(session).chat.completions.create(model="test", messages=messages, **more, **options)
        answer: dict[str, Any] = reply.choices[0].message.model_dump(exclude_none=True)
        return answer

    return call
