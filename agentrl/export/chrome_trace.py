"""A run as a trace of Chrome's format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    process   "trainer"      steps, and what the trainer waits for
              "publishes"    weights on their way to the engines
              "events"       what happened at one moment
              "episodes"     one slice for each session; "evaluation episodes" likewise
              URL            an engine's calls: each a slice, within it the wait for the first token and the decoding

Slices of a process that overlap lie in lanes of their own ("threads"). Times are microseconds since the first event.
The format: "Trace Event Format" of the Chromium project.
"""

from __future__ import annotations

import gzip
import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from agentrl.domain.schemas import Json
from agentrl.store import Database
from agentrl.store.exports import timeline_rows

TRAINER, PUBLISHES, EVENTS, EPISODES, EVALUATIONS, NO_ENGINE = (
    "trainer",
    "publishes",
    "events",
    "episodes",
    "evaluation episodes",
    "no engine yet",
)
ORDER = (TRAINER, PUBLISHES, EVENTS, EPISODES, EVALUATIONS, NO_ENGINE)
"""The processes from top to bottom; engines follow."""
LONGEST_TEXT = 500
Progress = Callable[[int, int], None]


class Lanes:
    """Gives each slice a lane in which no other one overlaps it."""

    def __init__(self) -> None:
        self._free_from: list[tuple[float, int]] = []  # a heap

    def place(self, start: float, end: float) -> int:
        """The lane of a slice, counted from 0."""
        if self._free_from and self._free_from[0][0] <= start:
            _, lane = heapq.heappop(self._free_from)
        else:
            lane = len(self._free_from)
        heapq.heappush(self._free_from, (end, lane))
        return lane


class Trace:
    """Makes the events of a trace, whose time 0 is `began` (seconds since the epoch). What still goes on ends `now`."""

    def __init__(self, began: float, now: float) -> None:
        self._began, self._now = began, now
        self._processes: dict[str, int] = {}
        self._lanes: dict[str, Lanes] = {}

    def slice(
        self, process: str, name: str, start: float, end: float | None, args: Json, parts: Iterable[Any] = ()
    ) -> Iterator[Json]:
        """A slice, and within it `parts`: (name, start, end)."""
        end = max(start, self._now if end is None else end)
        lanes = self._lanes.setdefault(process, Lanes())
        place = {"pid": self._pid(process), "tid": lanes.place(start, end)}
        yield {"ph": "X", "name": name, **place, **self._times(start, end), "args": args}
        for part, since, until in parts:
            inside = min(max(since, start), end), min(max(until, start), end)
            yield {"ph": "X", "name": part, **place, **self._times(*inside)}

    def instant(self, name: str, at: float, args: Json) -> Json:
        """Something that happened at one moment."""
        place = {"pid": self._pid(EVENTS), "tid": 0}
        return {"ph": "i", "s": "g", "name": name, **place, "ts": self._microseconds(at), "args": args}

    def counter(self, name: str, at: float, value: float) -> Json:
        """A number that changed."""
        return {"ph": "C", "name": name, "pid": self._pid(EVENTS), "ts": self._microseconds(at), "args": {name: value}}

    def names(self) -> Iterator[Json]:
        """The names and the order of all processes; the last events of a trace."""
        for process, pid in self._processes.items():
            rank = ORDER.index(process) if process in ORDER else len(ORDER) + pid
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": rank}}

    def _pid(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)

    def _times(self, start: float, end: float) -> Json:
        return {"ts": self._microseconds(start), "dur": round((end - start) * 1e6, 1)}

    def _microseconds(self, at: float) -> float:
        return round((at - self._began) * 1e6, 1)


def write(path: Path, database: Database, run: Any, progress: Progress, *, compressed: bool = False) -> int:
    """Write the trace of a run (a row of `runs`), gzip-compressed or not. Returns the number of its events. Memory does
    not grow with the run.
    """
    total, done, written = database.query(timeline_rows.count, run.id), 0, 0
    trace = Trace(float(run.created_at), time.time())
    with gzip.open(path, "wb", compresslevel=3) if compressed else path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(orjson.dumps({"run": run.name, "began": run.created_at}))
        file.write(b',"traceEvents":[\n')
        for pages, made in (
            (timeline_rows.of_events(database, run.id), _event),
            (timeline_rows.of_sessions(database, run.id), _session),
            (timeline_rows.of_calls(database, run.id), _call),
        ):
            for page in pages:
                for event in (event for row in page for event in made(trace, row)):
                    file.write(b",\n" * bool(written) + orjson.dumps(event))
                    written += 1
                done += len(page)
                progress(done, max(total, done))
        for event in trace.names():
            file.write(b",\n" * bool(written) + orjson.dumps(event))
            written += 1
        file.write(b"\n]}\n")
    return written


def _event(trace: Trace, row: Any) -> Iterator[Json]:
    data: Json = row.data
    args = {name: value for name, value in _short(data).items() if name not in ("start", "end", "updated")}
    if not {"start", "end"} <= data.keys() or data["start"] == data["end"]:
        yield trace.instant(row.kind, row.created_at, args | {"source": row.source})
        return
    start, end = float(data["start"]), float(data["end"])
    if row.kind == "publish":
        yield from trace.slice(PUBLISHES, f"publish version {data.get('version', '?')}", start, end, args)
        if isinstance(version := data.get("version"), int):
            yield trace.counter("weight version", end, version)
        return
    parts = []
    if "updated" in data:
        parts = [("update", start, float(data["updated"])), ("save", float(data["updated"]), end)]
    step = f" {data['step']}" if "step" in data else ""
    name = f"step{step}" if row.kind == "train_step" else row.kind.replace("_", " ") + step
    yield from trace.slice(TRAINER, name, start, end, args, parts)


def _session(trace: Trace, row: Any) -> Iterator[Json]:
    args = {"session": row.id, "group": row.group_id, "worker": row.owner, "status": row.status}
    args |= {"error": row.error[:LONGEST_TEXT]} if row.error else {}
    process = EVALUATIONS if row.is_eval else EPISODES
    yield from trace.slice(process, f"episode {row.id[:12]} #{row.sample_index}", row.created_at, row.ended_at, args)


def _call(trace: Trace, row: Any) -> Iterator[Json]:
    names = ("role", "status", "prompt_tokens", "cached_tokens", "output_tokens", "fork_reason")
    args = {"call": row.id, "session": row.session_id} | {name: row._mapping[name] for name in names}
    args["versions"] = [row.min_version, row.max_version]
    parts = []
    if row.first_token_at is not None and row.finished_at is not None:
        parts = [
            ("first token", row.created_at, row.first_token_at),
            ("decode", row.first_token_at, row.finished_at),
        ]
    process = row.engine_url or NO_ENGINE
    yield from trace.slice(process, f"call, {row.output_tokens} tokens", row.created_at, row.finished_at, args, parts)


def _short(data: Json) -> Json:
    """The facts of an event, long texts cut."""
    return {name: value[:LONGEST_TEXT] if isinstance(value, str) else value for name, value in data.items()}
