"""A receiver of spans, and a run whose sessions wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import history as history_module
import pytest
from history import CONFIG, LIMITS, History
from span_receiver import SpanReceiver
from sqlalchemy import update

from agentrl.configs.metrics_config import TracesConfig
from agentrl.export.spans.otlp_sender import OtlpSender
from agentrl.export.spans.session_spans import TracedRun
from agentrl.export.spans.trace_export import TraceExport
from agentrl.store import Database, runs
from agentrl.store.tables import runs as runs_table
from agentrl.trace_endpoint import endpoint_of


@pytest.fixture
def receiver() -> Iterator[SpanReceiver]:
    with SpanReceiver() as made:
        yield made


@pytest.fixture
def played(db: Database, monkeypatch: pytest.MonkeyPatch, receiver: SpanReceiver) -> History:
    """A run that sends spans, with no session yet."""
    monkeypatch.setattr(history_module, "LIMITS", replace(LIMITS, traced=True))
    made = History(db, seed=5)
    config = CONFIG | {"metrics": {"traces": {"endpoint": receiver.url}}}
    db.transact(lambda conn: conn.execute(update(runs_table).values(config=config)) and None)
    return made


@pytest.fixture
def export_to(played: History, receiver: SpanReceiver) -> Iterator[Callable[..., TraceExport]]:
    """Makes an export to the receiver, with other settings where they are given."""
    senders: list[OtlpSender] = []

    def make(database: Database | None = None, **settings: Any) -> TraceExport:
        database = database or played.db
        config = TracesConfig.model_validate({"endpoint": receiver.url, "timeout_s": 5.0} | settings)
        senders.append(OtlpSender(endpoint_of(config, {})))
        return TraceExport(database, TracedRun.of(database.query(runs.get, played.run_id), config), senders[-1])

    yield make
    for sender in senders:
        sender.close()
