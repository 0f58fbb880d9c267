"""Stores the tasks of a run: in batches, the first of every source before the run starts, the rest while it goes on.

    sources ──► TaskStream.batches ──► one transaction a batch: tasks + how far the source was read

A process that dies loses only the batch that it was about to store. The next one continues behind the last stored row.
The reader of a source pauses while `ahead` of its stored tasks have not been taken by the run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import Any

from agentrl.configs.episodes.task_sources import sources_of
from agentrl.configs.run_config import RunConfig
from agentrl.data.prompt_length import measure_of
from agentrl.data.task_stream import TaskStream
from agentrl.domain import task_order
from agentrl.errors import ConfigError, UserError
from agentrl.launch import run_folder
from agentrl.models import resolve_model
from agentrl.store import Database, Row, runs, task_rows
from agentrl.store.task_rows import NewSource

NOTE_EVERY_S = 10.0
POLL_S = 1.0
"""How often a source that waits looks at the run's data cursor."""

WAITS = "{:,} tasks are stored; further ones follow as the run takes them (tasks.ahead)"


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a run's tasks is stored."""

    stored: int
    usable: bool  # every source has the tasks with which a run can start
    complete: bool
    waits: bool = False  # nothing is left to store until the run takes further tasks


def check(config: RunConfig) -> list[NewSource]:
    """Read the first task of every source of a new run, without its length; returns the sources. Raises UserError."""
    sources = sources_of(config.tasks)
    if sources:
        try:
            task_order.shares(tuple(source.weight for source in sources))
        except ValueError as error:
            raise ConfigError(f"tasks: {error}") from None
    found = []
    for source in sources:
        with TaskStream(source, seed=config.seed, storage=config.storage) as stream:
            if not stream.tasks(1):
                raise UserError(f"tasks: {source.path!r} yields no task")
            window = None if source.order is None else source.order.model_dump(include={"width", "over"})
            found.append(NewSource(name=source.label, weight=source.weight, content=stream.content, window=window))
    return found


def ingest(
    database: Database, run_id: str, config: RunConfig, *, only_endless_wait: bool = False
) -> Iterator[Progress]:
    """Store what is missing of a run's tasks, batch by batch. Yields after each batch, and once at the start; while it
    `waits`, at each step. With `only_endless_wait`, sources that have an end are stored wholly.

    Raises UserError for a source that cannot be read, and ConfigError for one whose files have changed since the run
    started groups; before that, a changed source is read anew.
    """
    rows = {row.source: row for row in database.query(task_rows.sources, run_id)}
    sources = sources_of(config.tasks)
    ahead = {
        number: source.ahead
        for number, source in enumerate(sources)
        if source.ahead is not None
        and source.order is None
        and config.epochs is None
        and (source.may_be_endless or not only_endless_wait)
    }
    measured = [source for number, source in enumerate(sources) if not rows[number].complete]
    measure = measure_of(measured, partial(resolve_model, config.model, weights=config.steps > 0)) if measured else None
    with ExitStack() as held:
        streams = {
            number: held.enter_context(
                TaskStream(sources[number], seed=config.seed, storage=config.storage, measure=measure)
            )
            for number, row in rows.items()
            if not row.complete
        }
        for number, stream in streams.items():
            if stream.content != rows[number].content and not database.transact(
                task_rows.start_again, run_id, number, stream.content
            ):
                raise ConfigError(
                    f"tasks: {sources[number].path} has changed since the run was created, and not all of its tasks "
                    "are stored: restore it, or give another name to the run"
                )
        rows = {row.source: row for row in database.query(task_rows.sources, run_id)}
        batches = {number: stream.batches(rows[number].rows_read) for number, stream in streams.items()}
        read = {number: rows[number].rows_read for number in streams}
        while True:
            open_ = [number for number in streams if not rows[number].complete]
            most = _most(database, run_id, {number: ahead[number] for number in open_ if number in ahead}, rows)
            todo = [number for number in open_ if rows[number].stored < most.get(number, inf)]
            yield Progress(
                sum(row.stored for row in rows.values()),
                all(row.complete or (row.stored >= row.block and not row.window) for row in rows.values()),
                all(row.complete for row in rows.values()),
                waits=bool(open_) and not todo,
            )
            if not open_:
                return
            if not todo:
                rows = {row.source: row for row in database.query(task_rows.sources, run_id)}
                continue
            number = min(todo, key=lambda one: (rows[one].stored / rows[one].weight, one))
            batch = next(batches[number])
            if batch.last and not rows[number].stored + len(batch.texts):
                raise UserError(f"tasks: {sources[number].path!r} yields no task")
            database.transact(
                task_rows.add,
                run_id,
                number,
                batch.texts,
                read_before=read[number],
                read=batch.read,
                complete=batch.last,
            )
            read[number] = batch.read
            rows = {row.source: row for row in database.query(task_rows.sources, run_id)}
            if rows[number].rows_read != batch.read:  # another process stores tasks of this run too
                read[number] = rows[number].rows_read
                batches[number] = streams[number].batches(read[number])


def _most(database: Database, run_id: str, ahead: Mapping[int, int], rows: Mapping[int, Row[Any]]) -> dict[int, int]:
    """How many tasks of each source may be stored now. The last batch may exceed it."""
    if not ahead:
        return {}
    run = database.query(runs.get, run_id)
    taken = task_order.drawn(run.data_cursor, [rows[number].weight for number in sorted(rows)], run.seed)
    return {number: taken[number] + more for number, more in ahead.items()}


def with_known_steps(database: Database, config: RunConfig) -> RunConfig:
    """The configuration with the steps of its `epochs` so far: 1 until all tasks of the run are stored.

    Returns a configuration without `epochs` unchanged.
    """
    if config.epochs is None:
        return config
    run = database.query(runs.find, config.name)
    rows = [] if run is None else database.query(task_rows.sources, run.id)
    if not rows or not all(row.complete for row in rows):
        return config.model_copy(update={"steps": 1})
    tasks = sum(int(row.stored) for row in rows)
    return config.model_copy(update={"steps": ceil(config.epochs * tasks / config.trainer.groups_per_step)})


def with_steps(
    database: Database, run_id: str, config: RunConfig, show: Callable[[Progress], None] = lambda progress: None
) -> RunConfig:
    """The configuration with the steps of its `epochs`, which are stored with the run: first, all tasks are stored.

    Returns a configuration without `epochs` unchanged. Raises UserError.
    """
    if config.epochs is None:
        return config
    for progress in ingest(database, run_id, config):
        show(progress)
    counted = with_known_steps(database, config)
    database.transact(runs.set_steps, run_id, counted.steps, run_folder.stored(counted))
    return counted


async def follow(database: Database, run_id: str, config: RunConfig, note: Callable[[str], None]) -> None:
    """Store the rest of a run's tasks in a thread beside the run, with a note from time to time. Raises UserError."""
    stop = threading.Event()
    try:
        await asyncio.to_thread(_store, ingest(database, run_id, config), note, stop)
    finally:
        stop.set()


def _store(steps: Iterator[Progress], note: Callable[[str], None], stop: threading.Event) -> None:
    noted = started = time.monotonic()
    begun = waited = False
    for progress in steps:
        now = time.monotonic()
        if progress.waits:
            if not waited:
                note(WAITS.format(progress.stored))
                waited, noted = True, now
            if stop.wait(POLL_S):
                return
        elif progress.complete and begun:
            note(f"all {progress.stored:,} tasks are stored, after {now - started:.0f} s")
        elif now - noted >= NOTE_EVERY_S:
            note(f"{progress.stored:,} tasks are stored so far")
            noted = now
        begun = True
        if stop.is_set():
            return
