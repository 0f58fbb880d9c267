"""The group commit: a thread that runs queued units of work in few transactions."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from agentrl.errors import StoreError, StoreUnavailable
from agentrl.store.db import faults
from agentrl.store.db.bulk_unit import BulkUnit

T = TypeVar("T")
MAX_UNITS_PER_COMMIT = 256
GATHER_S = {range(2, 8): 0.003, range(8, 64): 0.01}
"""Sizes of a batch → seconds that the writer pauses after it, so that units submitted meanwhile share a commit."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 2.0

_Promise = Future[Any] | asyncio.Future[Any]
_Unit = tuple[_Promise, Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WritableDatabase(Protocol):
    """The part of a database that the writer uses."""

    where: str  # names it in messages
    is_sqlite: bool
    on_commit: Callable[[int, float], None]

    def connect(self, *, writing: bool) -> Connection:
        """A connection without a transaction."""

    def deadline(self) -> float:
        """The time (`time.monotonic`) until which a fault that begins now is retried."""


class _Failed:
    """A unit's own failure; the other units of its batch go on."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _BulkFailed(Exception):
    """A bulk call raised, so the item at fault is unknown."""


class GroupCommitWriter:
    """A thread that drains a queue: units that are queued together are committed together.

    - Submissions of one `BulkUnit` without keyword arguments run as one call of its `many`, in order. Then the rest run
      one by one, in order, each in a savepoint. A caller that needs another order waits for the first result.
    - A unit that raises, or whose item of a bulk call is an Exception, fails alone. When a bulk call itself raises,
      the batch is rolled back and its units run one by one.
    - When the connection is lost before COMMIT, or the SQLite file is locked, the batch is repeated until the deadline
      of the database, while the queue waits. After a deadlock each unit is repeated in its own transaction. So a unit
      may run more than once before it is committed, and must change nothing but the database.
    - When the connection is lost during COMMIT, every unit fails with OutcomeUnknown. Any other fault of the database
      fails every unit of the batch. Only durable work is acknowledged.
    - A unit whose future was cancelled before its batch began is not run.
    - A transaction costs more CPU than a unit. So after a small batch the writer pauses for GATHER_S, longer after a
      larger one, to make the next batch larger. It does not pause after a single unit: a lone caller waits only for
      its commit.
    """

    def __init__(self, database: WritableDatabase) -> None:
        self._database = database
        self._conn: Connection | None = None
        self._queue: queue.SimpleQueue[_Unit | None] = queue.SimpleQueue()
        self._gate = threading.Lock()  # no unit is queued after the end marker
        self._closing_deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="agentrl-store-writer", daemon=True)
        self._thread.start()

    def submit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Queue a unit of work. Raises StoreError once the writer is closed."""
        future: Future[T] = Future()
        self._enqueue((future, unit, args, kwargs))
        return future

    def asubmit(self, unit: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """`submit` for an event loop. The loop is woken once per batch, for all of the batch's units."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._enqueue((future, unit, args, kwargs))
        return future

    @property
    def queued(self) -> int:
        """How many units wait for the next batch."""
        return self._queue.qsize()

    def _enqueue(self, unit: _Unit) -> None:
        with self._gate:
            if self._closing_deadline != float("inf"):
                raise StoreError(f"{self._database.where} was closed by this process")
            self._queue.put(unit)

    def close(self) -> None:
        """Commit the queued units and stop; an unreachable database is retried until its deadline, once."""
        with self._gate:
            self._closing_deadline = self._database.deadline()
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing and (unit := self._queue.get()) is not None:
            units = [unit]
            while len(units) < MAX_UNITS_PER_COMMIT and not self._queue.empty():
                unit = self._queue.get()
                if unit is None:
                    closing = True
                    break
                units.append(unit)
            if units := [unit for unit in units if _is_wanted(unit[0])]:
                self._settle(units)
                if not closing:
                    time.sleep(next((pause for sizes, pause in GATHER_S.items() if len(units) in sizes), 0.0))
        self._disconnect()

    def _settle(self, units: list[_Unit]) -> None:
        """Run and commit the units, with retries, and resolve their futures."""
        started = time.monotonic()
        until = self._database.deadline()
        waits = pauses()
        bulk = True
        while True:
            try:
                outcomes = self._attempt(units, bulk)
            except _BulkFailed:
                bulk = False
            except faults.Conflict as error:
                if len(units) > 1:
                    for unit in units:
                        self._settle([unit])
                    return
                if time.monotonic() > until:
                    return _fail(units, error)
                time.sleep(next(waits))
            except StoreUnavailable as error:
                if isinstance(error, faults.OutcomeUnknown) or time.monotonic() > min(until, self._closing_deadline):
                    return _fail(units, error)
                time.sleep(next(waits))
            except BaseException as error:  # noqa: BLE001 - not swallowed: the futures get it
                return _fail(units, error)
            else:
                _deliver(units, outcomes)
                return self._database.on_commit(len(units), time.monotonic() - started)

    def _attempt(self, units: list[_Unit], bulk: bool) -> list[Any]:
        """One transaction with all units; their results or `_Failed`, in order."""
        try:
            if self._conn is None:
                self._conn = self._database.connect(writing=True)
            with faults.transaction(self._conn, self._database.where):
                return self._execute(self._conn, units, bulk)
        except BaseException:
            self._disconnect()  # back to the pool, which checks it before it lends it again
            raise

    def _execute(self, conn: Connection, units: list[_Unit], bulk: bool) -> list[Any]:
        if len(units) == 1:
            _, unit, args, kwargs = units[0]
            return [unit(conn, *args, **kwargs)]
        outcomes: list[Any] = [None] * len(units)
        alike: dict[BulkUnit[..., Any], list[int]] = {}
        apart: list[int] = []
        for i, (_, unit, _, kwargs) in enumerate(units):
            if bulk and not kwargs and isinstance(unit, BulkUnit):
                alike.setdefault(unit, []).append(i)
            else:
                apart.append(i)
        for shared, indices in alike.items():
            for i, result in zip(indices, self._run_bulk(conn, shared, [units[i][2] for i in indices]), strict=True):
                outcomes[i] = _Failed(self._future_error(result)) if isinstance(result, Exception) else result
        for i in apart:
            _, unit, args, kwargs = units[i]
            outcomes[i] = self._run_apart(conn, unit, args, kwargs)
        return outcomes

    def _run_bulk(self, conn: Connection, unit: BulkUnit[..., Any], items: list[tuple[Any, ...]]) -> Sequence[Any]:
        try:
            results = unit.many(conn, items)
        except Exception as error:
            if _is_fault(error):
                raise
            raise _BulkFailed from error
        if len(results) != len(items):
            raise _BulkFailed
        return results

    def _run_apart(self, conn: Connection, unit: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        savepoint = conn.begin_nested()
        try:
            result = unit(conn, *args, **kwargs)
            savepoint.commit()
        except Exception as error:
            if _is_fault(error) or (self._database.is_sqlite and not faults.is_sound(conn)):
                raise
            savepoint.rollback()
            return _Failed(self._future_error(error))
        return result

    def _future_error(self, error: Exception) -> Exception:
        """A unit's error as its future raises it."""
        if not isinstance(error, DBAPIError):
            return error
        told = faults.store_error(error, self._database.where)
        told.__cause__ = error
        return told

    def _disconnect(self) -> None:
        if self._conn is not None:
            with contextlib.suppress(DBAPIError):
                self._conn.close()
            self._conn = None


def pauses() -> Iterator[float]:
    """Seconds to wait before each retry: doubling, with jitter so that processes do not collide again."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause * random.uniform(0.5, 1.5)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def _fail(units: list[_Unit], error: BaseException) -> None:
    _deliver(units, [_Failed(error)] * len(units))


def _deliver(units: list[_Unit], outcomes: list[Any]) -> None:
    """Resolve the futures of a batch; those of an event loop together, in the loop's thread."""
    of_loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for (future, *_), outcome in zip(units, outcomes, strict=True):
        if isinstance(future, asyncio.Future):
            of_loops.setdefault(future.get_loop(), []).append((future, outcome))
        else:
            _resolve(future, outcome)
    for loop, settled in of_loops.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: its futures are no longer awaited
            loop.call_soon_threadsafe(_resolve_all, settled)


def _resolve_all(settled: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in settled:
        if not future.done():  # its task was cancelled while the batch ran
            _resolve(future, outcome)


def _resolve(future: _Promise, outcome: Any) -> None:
    if type(outcome) is _Failed:
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome)


def _is_wanted(future: _Promise) -> bool:
    """Start a unit's future, so that it can no longer be cancelled; false if it was cancelled before."""
    return not future.cancelled() if isinstance(future, asyncio.Future) else future.set_running_or_notify_cancel()


def _is_fault(error: Exception) -> bool:
    """Whether the database failed, not just a statement."""
    return isinstance(error, DBAPIError) and faults.classify(error) is not faults.Fault.STATEMENT
