"""A run as a trace: every step, publish, session and call, and no two slices of a lane overlap."""

from __future__ import annotations

import gzip
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from history import History
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.export import chrome_trace
from agentrl.export.chrome_trace import Lanes
from agentrl.store import Database, events, runs
from agentrl.store.exports import timeline_rows
from agentrl.store.tables import interactions, sessions


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20))))
def test_slices_of_a_lane_do_not_overlap_in_whatever_order_they_come(slices: list[tuple[float, float]]) -> None:
    lanes, placed = Lanes(), defaultdict[int, list[tuple[float, float]]](list)
    for start, length in slices:
        placed[lanes.place(start, start + length)].append((start, start + length))
    for of_lane in placed.values():
        of_lane.sort()
        assert all(one[1] <= other[0] for one, other in pairwise(of_lane))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9))))
def test_slices_in_order_of_their_start_take_as_few_lanes_as_overlap(slices: list[tuple[int, int]]) -> None:
    lanes, ordered = Lanes(), sorted(slices)
    used = {lanes.place(start, start + length) for start, length in ordered}
    busiest = max((sum(s <= at < s + n for s, n in ordered) for at in range(60)), default=0)
    assert used == set(range(busiest))


@pytest.fixture
def history(db: Database, monkeypatch: pytest.MonkeyPatch) -> History:
    monkeypatch.setattr(timeline_rows, "PAGE_ROWS", 3)
    made = History(db, seed=1)
    made.train(2)
    made.evaluation()
    record = {"start": 10.0, "end": 14.0, "updated": 13.0, "step": 1, "version": 1}
    db.transact(events.record, made.run_id, "train_step", record, "trainer")
    db.transact(events.record, made.run_id, "publish", {"start": 14.0, "end": 15.0, "version": 1}, "proxy")
    db.transact(events.record, made.run_id, "engine_left", {"url": "e", "why": "x" * 1000}, "proxy")
    return made


def read(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(path.read_bytes())["traceEvents"]
    return found


@pytest.mark.long_on("postgresql")
def test_a_trace_has_every_session_call_step_and_publish(history: History, tmp_path: Path) -> None:
    run, seen = history.db.query(runs.get, history.run_id), list[tuple[int, int]]()
    path = tmp_path / "trace.json"
    written = chrome_trace.write(path, history.db, run, lambda done, total: seen.append((done, total)))
    found = read(path)
    assert written == len(found)
    assert seen[-1][0] == seen[-1][1]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    by_process = defaultdict[str, list[dict[str, Any]]](list)
    for event in found:
        if event["ph"] != "M":
            by_process[names[event["pid"]]].append(event)
    with history.db.read() as conn:
        all_sessions, all_calls = (
            set(conn.execute(select(table.c.id).where(table.c.run_id == history.run_id)).scalars())
            for table in (sessions, interactions)
        )
    episodes = by_process["episodes"] + by_process["evaluation episodes"]
    assert {event["args"]["session"] for event in episodes} == all_sessions
    assert {event["args"]["call"] for event in by_process["e"] if "args" in event} == all_calls
    step, update, save = by_process["trainer"]
    assert (step["name"], step["dur"], step["args"]) == ("step 1", 4e6, {"step": 1, "version": 1})
    assert [(part["name"], part["dur"]) for part in (update, save)] == [("update", 3e6), ("save", 1e6)]
    assert [event["name"] for event in by_process["publishes"]] == ["publish version 1"]
    left = next(event for event in by_process["events"] if event["name"] == "engine_left")
    assert len(left["args"]["why"]) == chrome_trace.LONGEST_TEXT
    assert all(event["dur"] >= 0 for event in found if event["ph"] == "X")


@pytest.mark.long_on("postgresql")
def test_the_command_writes_a_compressed_trace(history: History, tmp_path: Path) -> None:
    out = tmp_path / "run.json.gz"
    url = str(history.db.url)
    found = CliRunner().invoke(app, ["timeline", "--database-url", url, "--run", "test", "--out", str(out)])
    assert found.exit_code == 0, found.output
    events_ = orjson.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert f"{len(events_):,} events" in found.output
    again = CliRunner().invoke(app, ["timeline", "--database-url", url, "--run", "test", "--out", str(out)])
    assert again.exit_code != 0
