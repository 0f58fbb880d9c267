"""Reading the next batch during a step: the step trains the same batch as without it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from loop_setup import Setup
from sqlalchemy import update

from agentrl.domain.batches.outline import Outline
from agentrl.errors import StoreError
from agentrl.store.tables import interaction_data
from agentrl.store.training import steps
from agentrl.store.training.paths import path_outlines, path_tokens
from agentrl.trainer.batches.batch_reader import BatchReader
from agentrl.trainer.batches.read_ahead import ReadAhead
from agentrl.trainer.batches.token_cache import TokenCache
from agentrl.trainer.run.next_share import ReadyGroups

MIB = 1 << 20


def outlines(s: Setup) -> list[Outline]:
    return ReadyGroups(s.database, s.run_id, 5).oldest(2, 0)


def ahead(s: Setup, limit: int, mine: Any = lambda batch: range(len(batch))) -> tuple[BatchReader, ReadAhead]:
    reader = BatchReader(s.database, TokenCache(limit))
    return reader, ReadAhead(reader, lambda: outlines(s), mine)


def test_the_next_step_finds_its_tokens(setup: Setup) -> None:
    reader, reads = ahead(setup, MIB)
    reads.fill()
    batch = outlines(setup)
    assert [t.trajectory_id for t in reader.read(batch)] == [one.trajectory_id for one in batch]
    assert (reader.found, reader.missed) == (len(batch), 0)
    assert reader.cache.size_bytes == 0
    again = list(reader.read(batch))
    assert (reader.found, reader.missed) == (len(batch), len(batch))
    reads.fill()
    for from_store, from_cache in zip(again, reader.read(batch), strict=True):
        assert from_store.digest() == from_cache.digest()


def test_the_outlines_of_a_ready_group_are_read_once_for_a_version(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guess is made again every two seconds, and a batch may have many calls."""
    known, real, read = ReadyGroups(setup.database, setup.run_id, 5), path_outlines.read, list[str]()

    def watched(conn: Any, ids: Sequence[str], **kwargs: Any) -> list[Outline]:
        read.extend(ids)
        return real(conn, ids, **kwargs)

    monkeypatch.setattr(path_outlines, "read", watched)
    first = known.oldest(1, 0)
    both = known.oldest(2, 0)
    assert known.oldest(2, 0) == both
    assert both[: len(first)] == first
    assert read == [one.trajectory_id for one in both]
    known.oldest(2, 1)
    assert read == 2 * [one.trajectory_id for one in both]


def test_tokens_that_the_cache_drops_during_a_read_are_in_it(setup: Setup) -> None:
    reader, reads = ahead(setup, MIB)
    reads.fill()
    batch = outlines(setup)
    read = reader.read(batch)
    first = next(read)
    reader.cache.keep_only([])  # as a thread does that reads ahead for another batch
    assert [t.trajectory_id for t in (first, *read)] == [one.trajectory_id for one in batch]


def test_a_rank_reads_only_its_share(setup: Setup) -> None:
    reader, reads = ahead(setup, MIB, lambda batch: [1, 3])
    reads.fill()
    assert [one.trajectory_id in reader.cache for one in outlines(setup)] == [False, True, False, True, False, False]


def test_a_small_cache_stays_within_its_bytes(setup: Setup) -> None:
    batch = outlines(setup)
    limit = sum(8 * one.length for one in batch[:2]) + 1
    reader, reads = ahead(setup, limit)
    reads.fill()
    assert reader.cache.size_bytes <= limit
    assert len(list(reader.read(batch))) == len(batch)


def test_nothing_is_read_without_memory_for_it(setup: Setup) -> None:
    _, reads = ahead(setup, 0)
    reads.start()
    assert reads._thread is None
    reads.stop()


def test_a_thread_reads_until_it_is_stopped(setup: Setup) -> None:
    filled = threading.Event()

    def mine(batch: Sequence[Outline]) -> range:
        filled.set()
        return range(len(batch))

    reader, reads = ahead(setup, MIB, mine)
    reads.start()
    assert filled.wait(60)
    reads.stop()
    assert reads._thread is None
    reads.start()
    reads.stop()
    assert all(one.trajectory_id in reader.cache for one in outlines(setup))


def test_damaged_tokens_are_left_to_the_step_which_reports_them(setup: Setup) -> None:
    reader, reads = ahead(setup, MIB)
    with setup.database.write() as conn:
        conn.execute(update(interaction_data).values(output_ids=b"no zstandard"))
    reads._run()  # ends instead of trying again
    with pytest.raises(StoreError, match="recorded tokens of the batch are damaged"):
        list(reader.read(outlines(setup)))


def test_a_fault_while_reading_ahead_is_left_to_the_step(setup: Setup) -> None:
    reader, reads = ahead(setup, MIB)
    found = threading.Event()

    def fails() -> list[Outline]:
        found.set()
        raise LookupError("no such call")

    reads._guess = fails
    reads.start()
    assert found.wait(60)
    reads.stop()
    assert reader.cache.size_bytes == 0


def test_a_run_reads_ahead_and_trains_the_same(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step's tokens were read during the first one."""
    read: list[str] = []
    real, fill, done = path_tokens.read, ReadAhead.fill, threading.Event()

    def watched(conn: Any, paths: Any, **kwargs: Any) -> Any:
        read.extend(paths)
        return real(conn, paths, **kwargs)

    def filled(self: ReadAhead) -> None:
        fill(self)
        done.set()

    stop = ReadAhead.stop

    def stopped(self: ReadAhead) -> None:
        assert done.wait(60)
        stop(self)

    monkeypatch.setattr(path_tokens, "read", watched)
    monkeypatch.setattr(ReadAhead, "fill", filled)
    monkeypatch.setattr(ReadAhead, "stop", stopped)
    assert setup.train()
    assert len(read) == len(set(read)) == 18  # each trajectory once
    with setup.database.read() as conn:
        for row in steps.of_run(conn, setup.run_id):
            assert steps.batch(conn, row.id).digest() == row.batch_digest
