"""Each engine has a few watchers among the live replicas; a replica that dies hands over only its own engines."""

from __future__ import annotations

from collections import Counter

import pytest

from agentrl.proxy.engines.watchers import FIRST_BEAT_S, LiveReplicas, list_digest, watched_by

URLS = [f"http://10.0.{n // 250}.{n % 250}:30000" for n in range(1000)]
REPLICAS = [f"proxy-{n}:8080" for n in range(10)]


def watchers(replicas: list[str], count: int = 2) -> dict[str, set[str]]:
    """The watchers of each engine, as every replica computes its own part."""
    found: dict[str, set[str]] = {url: set() for url in URLS}
    for me in replicas:
        for url in watched_by(me, URLS, replicas, count):
            found[url].add(me)
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_engine_has_as_many_watchers_as_asked_for_and_they_share_the_work(count):
    found = watchers(REPLICAS, count)
    assert {len(names) for names in found.values()} == {count}
    load = Counter(name for names in found.values() for name in names)
    assert max(load.values()) < 1.4 * count * len(URLS) / len(REPLICAS)


@pytest.mark.parametrize("replicas", [REPLICAS[:1], REPLICAS[:2]])
def test_few_replicas_all_watch(replicas):
    assert set(map(frozenset, watchers(replicas).values())) == {frozenset(replicas)}


def test_a_replica_that_dies_leaves_the_other_watchers_where_they_are():
    before, after = watchers(REPLICAS), watchers(REPLICAS[1:])
    for url, names in before.items():
        assert names - {REPLICAS[0]} <= after[url]


def test_a_replica_that_the_store_does_not_know_yet_counts_itself():
    assert watched_by("new", URLS, [], 2) == set(URLS)


def test_a_replica_is_dead_when_its_heartbeat_stops():
    live = LiveReplicas("me", silent_s=10.0)
    assert live.read({"me": 1.0, "other": 1.0}, now=100.0) == {"me", "other"}
    assert live.read({"me": 2.0, "other": 2.0}, now=101.0) == {"me", "other"}
    for second in range(2, 12):
        assert live.read({"me": 1.0 + second, "other": 2.0}, now=100.0 + second) == {"me", "other"}
    assert live.read({"me": 13.0, "other": 2.0}, now=112.0) == {"me"}
    assert live.read({"me": 14.0, "other": 2.5}, now=113.0) == {"me", "other"}  # whatever its clock says
    assert live.read({}, now=114.0) == {"me"}


def test_a_replica_that_was_dead_before_this_one_started_is_not_waited_for():
    live = LiveReplicas("me", silent_s=10.0)
    found = [live.read({"gone": 1.0}, now=100.0 + second) for second in range(int(FIRST_BEAT_S) + 2)]
    assert [len(names) for names in found] == [2] * (int(FIRST_BEAT_S) + 1) + [1]


def test_an_outage_of_the_database_makes_no_replica_look_dead():
    live = LiveReplicas("me", silent_s=10.0)
    live.read({"other": 1.0}, now=100.0)
    live.read({"other": 2.0}, now=101.0)
    assert live.read({"other": 2.0}, now=1000.0) == {"me", "other"}


def test_lists_of_the_same_engines_have_one_digest():
    assert list_digest(URLS) == list_digest(reversed(URLS)) != list_digest(URLS[1:])
