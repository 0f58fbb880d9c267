"""The tree by which hosts read a version from each other, in a simulated fleet with a clock that is counted."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.proxy.engines.fan_out import ORIGIN, Copy, Stage, next_fetches

ABSENT, FETCHING, PRESENT = Stage.ABSENT, Stage.FETCHING, Stage.PRESENT


def hosts(n: int) -> list[Copy]:
    return [Copy(host=f"h{i:04}", stage=ABSENT) for i in range(n)]


def test_the_first_hosts_read_from_the_origin_and_serve_the_next_ones():
    assert next_fetches(hosts(5), fan_out=2, origins=1) == {"h0000": ORIGIN}
    first, *others = hosts(5)
    copies = [replace(first, stage=PRESENT), *others]
    assert next_fetches(copies, fan_out=2, origins=1) == {"h0001": ORIGIN, "h0002": "h0000", "h0003": "h0000"}


def test_the_least_occupied_host_serves_the_next_one():
    copies = [
        Copy(host="a", stage=PRESENT),
        Copy(host="b", stage=PRESENT),
        Copy(host="c", stage=FETCHING, source="a"),
        Copy(host="d", stage=ABSENT),
    ]
    assert next_fetches(copies, fan_out=2, origins=0) == {"d": "b"}


def test_a_source_that_failed_is_not_used_again():
    copies = [Copy(host="a", stage=PRESENT), Copy(host="b", stage=ABSENT, avoids=frozenset({"a"}))]
    assert next_fetches(copies, fan_out=2, origins=1) == {"b": ORIGIN}
    copies[1] = replace(copies[1], avoids=frozenset({"a", ORIGIN}))
    assert next_fetches(copies, fan_out=2, origins=1) == {}


def test_hosts_that_relay_have_children_while_they_fetch():
    copies = [Copy(host="a", stage=FETCHING, relays=True), Copy(host="b", stage=FETCHING), Copy(host="c", stage=ABSENT)]
    assert next_fetches(copies, fan_out=2, origins=0) == {"c": "a"}


def test_a_host_does_not_read_from_one_that_waits_for_it():
    """`a` has lost its source; `b` reads from `a`, and `c` from `b`."""
    copies = [
        Copy(host="a", stage=ABSENT),
        Copy(host="b", stage=FETCHING, source="a", relays=True),
        Copy(host="c", stage=FETCHING, source="b", relays=True),
        Copy(host="d", stage=FETCHING, relays=True),
    ]
    assert next_fetches(copies, fan_out=2, origins=0) == {"a": "d"}
    assert next_fetches(copies[:3], fan_out=2, origins=0) == {}


@pytest.mark.parametrize(("fan_out", "origins"), [(1, 1), (2, 2), (4, 2)])
def test_the_tree_grows_by_its_fan_out_in_each_round(fan_out, origins):
    copies, rounds = {copy.host: copy for copy in hosts(1000)}, 0
    while any(copy.stage is ABSENT for copy in copies.values()):
        for host in next_fetches(copies.values(), fan_out=fan_out, origins=origins):
            copies[host] = replace(copies[host], stage=PRESENT)
        rounds += 1
    assert rounds <= math.ceil(math.log(1000 / origins, 1 + fan_out)) + 1


COPIES = st.lists(
    st.builds(
        Copy,
        host=st.sampled_from("abcdefghij"),
        stage=st.sampled_from(Stage),
        source=st.sampled_from([*"abcdefghij", ORIGIN]),
        avoids=st.frozensets(st.sampled_from([*"abcdefghij", ORIGIN]), max_size=4),
        relays=st.booleans(),
    ),
    unique_by=lambda copy: copy.host,
)


def chain(source: str | None, by_host: dict[str, Copy]) -> set[str]:
    """The hosts on the way from a source to the origin."""
    hosts: set[str] = set()
    while source is not None and source not in hosts:
        hosts.add(source)
        copy = by_host.get(source)
        source = copy.source if copy is not None and copy.stage is FETCHING else None
    return hosts


@given(COPIES, st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_invariants(copies, fan_out, origins, draw):
    fetches = next_fetches(copies, fan_out=fan_out, origins=origins)
    by_host = {copy.host: copy for copy in copies}
    used = Counter(copy.source for copy in copies if copy.stage is FETCHING) + Counter(fetches.values())
    for host, source in fetches.items():
        assert by_host[host].stage is ABSENT
        assert source not in by_host[host].avoids
        assert source is ORIGIN or by_host[source].serves
        assert host not in chain(source, by_host)
        assert used[source] <= (origins if source is ORIGIN else fan_out)
    for copy in copies:
        if copy.stage is ABSENT and copy.host not in fetches:  # it waits: every source that it may use is occupied
            assert ORIGIN in copy.avoids or used[ORIGIN] >= origins
            usable = (
                c.host
                for c in copies
                if c.serves and c.host not in copy.avoids and copy.host not in chain(c.host, by_host)
            )
            assert all(used[host] >= fan_out for host in usable)
    assert next_fetches(draw.sample(copies, len(copies)), fan_out=fan_out, origins=origins) == fetches


@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_every_host_gets_the_version_while_hosts_die_and_join(n, fan_out, origins, seed):
    """A fetch from a host that has died fails, and garbage from a host counts as a failure."""
    draw, now = random.Random(seed), 0.0
    copies = {copy.host: copy for copy in hosts(n)}
    ends: dict[str, float] = {}
    liars = {host for host in copies if draw.random() < 0.1}
    for step in range(100 * n):
        for host, source in next_fetches(copies.values(), fan_out=fan_out, origins=origins).items():
            copies[host] = replace(copies[host], stage=FETCHING, source=source)
            ends[host] = now + draw.random()
        served = Counter(copy.source for copy in copies.values() if copy.stage is FETCHING)
        assert served[ORIGIN] <= origins
        assert all(count <= fan_out for host, count in served.items() if host is not ORIGIN)
        if step < 2 * n and draw.random() < 0.2:
            gone = draw.choice(list(copies))
            copies.pop(gone)
            ends.pop(gone, None)
            copies[f"new{step}"] = Copy(host=f"new{step}", stage=ABSENT)
        if not ends and all(copy.stage is PRESENT for copy in copies.values()):
            break
        if not ends:  # the host that died was the only one that fetched
            continue
        host = min(ends, key=lambda host: ends[host])
        now = ends.pop(host)
        copy = copies[host]
        if copy.source is not ORIGIN and (copy.source not in copies or copy.source in liars):
            copies[host] = replace(copy, stage=ABSENT, source=ORIGIN, avoids=copy.avoids | {copy.source})
        else:
            copies[host] = replace(copy, stage=PRESENT)
    assert {copy.stage for copy in copies.values()} <= {PRESENT}
