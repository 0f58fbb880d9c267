"""Repeated starts of a group on two connections."""

from __future__ import annotations

from concurrent_writes import counters, meanwhile

from agentrl.store.sessions import (
    group_starts,
)


def test_a_repeated_start_gets_the_same_group_and_takes_one_place(db, run_id, limits):
    def start(conn):
        return group_starts.start_group(conn, run_id, limits, ["a", "b"], start_digest="d")

    first, second = meanwhile(db, start, start)
    assert first == second
    assert counters(db, run_id) == (1, 1, 0)


def test_a_repeated_evaluation_gets_the_same_group(db, run_id, limits):
    def start(conn):
        return group_starts.start_evaluation(conn, run_id, limits, ["a"], {"n": 1}, {}, None, start_digest="d")

    first, second = meanwhile(db, start, start)
    assert first == second
    assert counters(db, run_id) == (0, 0, 0)
