"""The rows of a band are those that the flow counts, page by page."""

from __future__ import annotations

import pytest
from history import LIMITS, History

from agentrl.domain.schemas import Json, SessionStatus
from agentrl.store import Database, sample_flow
from agentrl.store.db import codec
from agentrl.store.sessions import group_starts
from agentrl.store.sessions.ends import sealing
from agentrl.store.views import band_rows


@pytest.fixture
def history(db: Database) -> History:
    """Samples in every band."""
    made = History(db, seed=3)
    made.train(2)
    made.group(reward=False)
    made.group()
    with db.write() as conn:
        for status in (SessionStatus.FAILED, SessionStatus.ABANDONED):
            new = group_starts.start_group(conn, made.run_id, LIMITS, [codec.new_id() for _ in range(2)])
            for session_id in new.session_ids:
                sealing.end(conn, session_id, status, "it broke", LIMITS)
        group_starts.start_group(conn, made.run_id, LIMITS, [codec.new_id() for _ in range(2)])
    made.evaluation()
    return made


def every(history: History, band: str, reason: str | None) -> list[Json]:
    rows: list[Json] = []
    while True:
        page = history.db.query(band_rows.of_band, history.run_id, band, reason, rows[-1]["id"] if rows else None)
        rows += page
        if len(page) < band_rows.PAGE:
            return rows


def test_each_band_of_the_flow_has_as_many_rows_as_it_counts(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(band_rows, "PAGE", 2)
    flow = history.db.query(sample_flow.of_run, history.run_id)
    assert {one["band"] for one in flow["bands"]} >= {"trained", "waiting", "open", "rejected", "without calls"}
    seen: list[str] = []
    for one in flow["bands"]:
        rows = every(history, one["band"], one["reason"])
        assert len(rows) == one["samples"], one
        assert [row["id"] for row in rows] == sorted((row["id"] for row in rows), reverse=True)
        seen += [row["id"] for row in rows]
    assert len(seen) == len(set(seen)) == flow["samples"]


def test_a_trained_sample_names_its_step_and_its_return(history: History) -> None:
    rows = every(history, "trained", None)
    assert {row["step"] for row in rows} == {1, 2}
    assert all(row["return_"] is not None and row["trainable_tokens"] > 0 for row in rows)


def test_a_step_that_was_rolled_back_is_not_named(history: History) -> None:
    history.go_back(1)
    assert {row["step"] for row in every(history, "trained", None)} == {1}
    rows = [row for band in ("waiting", "stale") for row in every(history, band, None)]
    assert rows
    assert {row["step"] for row in rows} == {None}
    assert len({row["id"] for row in rows}) == len(rows)


def test_a_sample_is_listed_once_when_it_was_trained_again(history: History) -> None:
    history.go_back(1)
    history.train(1)
    rows = every(history, "trained", None)
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["step"] for row in rows} == {1, 2}


def test_sessions_without_calls_say_why(history: History) -> None:
    failed = every(history, "without calls", "failed")
    assert {(row["state"], row["reason"]) for row in failed} == {("failed", "it broke")}
    assert [row for row in every(history, "open", None) if row["state"] != "open"] == []


def test_other_runs_are_left_out(history: History) -> None:
    History(history.db, name="other").train(1)
    assert len(every(history, "trained", None)) == sum(
        one["samples"]
        for one in history.db.query(sample_flow.of_run, history.run_id)["bands"]
        if one["band"] == "trained"
    )
