"""Waves: the share that serves, the limit of loads, and every engine gets the version, in a simulated fleet."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.proxy.engines.waves import Candidate, Need, next_wave, spare

NOW, IDLE, NOTHING = Need.NOW, Need.IDLE, Need.NOTHING


def fleet(n: int, **values: object) -> list[Candidate]:
    return [Candidate(url=f"e{i}", **({"need": NOW} | values)) for i in range(n)]


@pytest.mark.parametrize(
    ("engines", "share", "parallel", "begin"),
    [
        (fleet(1), 0.75, 32, 1),
        (fleet(7), 0.75, 32, 1),
        (fleet(8), 0.75, 32, 2),
        (fleet(1000), 0.75, 32, 32),
        (fleet(1000), 0.75, 500, 250),
        (fleet(1000, prepared=True), 0.75, 32, 250),  # nothing is read under the pause
        (fleet(10), 0.9, 32, 1),
        (fleet(20), 0.9, 32, 2),
        (fleet(8), 0.0, 32, 8),
        (fleet(8), 1.0, 32, 1),
        (fleet(9, in_service=False), 0.75, 4, 4),  # no call waits for them
        (fleet(8, need=NOTHING), 0.75, 32, 0),
        (fleet(8, changing=True), 0.75, 32, 0),
    ],
)
def test_the_size_of_a_wave(engines, share, parallel, begin):
    assert len(next_wave(engines, serving_share=share, parallel=parallel)) == begin


def test_engines_out_of_service_do_not_use_the_share():
    engines = [*fleet(8), *(Candidate(url=f"dead{i}", need=NOW, in_service=False) for i in range(3))]
    wave = next_wave(engines, serving_share=0.75, parallel=32)
    assert sum(url.startswith("dead") for url in wave) == 3
    assert len(wave) == 5


def test_the_engines_with_the_fewest_calls_change_first():
    engines = [Candidate(url=url, need=NOW, running=n) for url, n in (("a", 3), ("b", 0), ("c", 1), ("d", 2))]
    assert next_wave(engines, serving_share=0.5, parallel=8) == ["b", "c"]


def test_an_idle_engine_that_may_wait_changes_and_a_busy_one_waits():
    busy, idle = Candidate(url="busy", need=IDLE, running=2), Candidate(url="idle", need=IDLE)
    assert next_wave([busy, idle], serving_share=0.5, parallel=8) == ["idle"]
    assert next_wave([busy, replace(idle, need=NOTHING, current=True)], serving_share=0.5, parallel=8) == []


def test_without_an_idle_engine_the_least_loaded_one_begins_alone():
    engines = [Candidate(url=f"e{n}", need=IDLE, running=n) for n in (3, 1, 2)]
    assert next_wave(engines, serving_share=0.1, parallel=8) == ["e1"]
    begun = [replace(engine, changing=engine.url == "e1") for engine in engines]
    assert next_wave(begun, serving_share=0.1, parallel=8) == []


CANDIDATES = st.lists(
    st.builds(
        Candidate,
        url=st.text("abcdef", min_size=1, max_size=3),
        need=st.sampled_from(Need),
        in_service=st.booleans(),
        changing=st.booleans(),
        prepared=st.booleans(),
        current=st.booleans(),
        running=st.integers(0, 3),
    ),
    unique_by=lambda engine: engine.url,
    max_size=24,
)
SHARE = st.floats(0, 1)


@given(CANDIDATES, SHARE, st.integers(1, 8), st.randoms())
def test_invariants(engines, share, parallel, draw):
    wave = next_wave(engines, serving_share=share, parallel=parallel)
    by_url = {engine.url: engine for engine in engines}
    chosen = [by_url[url] for url in wave]
    assert len(set(wave)) == len(wave)
    assert all(engine.need is not NOTHING and not engine.changing for engine in chosen)
    in_service = sum(engine.in_service for engine in engines)
    away = sum(engine.in_service for engine in chosen)
    if away:
        away += sum(engine.in_service and engine.changing for engine in engines)
        assert away == 1 or in_service - away >= in_service * share - 1e-6
    loads = sum(not engine.prepared for engine in chosen)
    if loads:
        assert loads + sum(engine.changing and not engine.prepared for engine in engines) <= parallel
    mixed = draw.sample(engines, len(engines))
    assert next_wave(mixed, serving_share=share, parallel=parallel) == wave


@dataclass
class Simulated:
    """An engine of a simulated fleet, with a clock that is counted."""

    candidate: Candidate
    ends_at: float = math.inf


@given(st.integers(1, 40), SHARE, st.integers(1, 8), st.integers(0, 10**6))
def test_every_engine_gets_the_version_while_engines_die_and_join(n, share, parallel, seed):
    """A dead engine serves nothing, and needs the version when it is back."""
    draw, now = random.Random(seed), 0.0
    engines = {f"e{i}": Simulated(_one(f"e{i}", draw)) for i in range(n)}
    for step in range(20 * n + 50):
        faults = step < 3 * n
        if faults and draw.random() < 0.2:
            url = draw.choice(list(engines))
            dead = replace(engines[url].candidate, in_service=False, changing=False, need=NOW, current=False)
            engines[url] = Simulated(dead)
        if faults and draw.random() < 0.1:
            engines[f"new{step}"] = Simulated(replace(_one(f"new{step}", draw), in_service=False))
        for url in next_wave((e.candidate for e in engines.values()), serving_share=share, parallel=parallel):
            engines[url].candidate = replace(engines[url].candidate, changing=True)
            engines[url].ends_at = now + draw.random()
        served = [engine.candidate for engine in engines.values() if engine.candidate.in_service]
        away = sum(candidate.changing for candidate in served)
        assert away <= spare(len(served), share) or faults  # a death lowers what the share allows
        changing = [engine for engine in engines.values() if engine.candidate.changing]
        if not changing:
            break
        first = min(changing, key=lambda engine: engine.ends_at)
        now = first.ends_at
        done = replace(first.candidate, changing=False, in_service=True, need=NOTHING, current=True)
        first.candidate, first.ends_at = done, math.inf
    assert all(engine.candidate.current for engine in engines.values())


def _one(url: str, draw: random.Random) -> Candidate:
    return Candidate(url=url, need=NOW, prepared=draw.random() < 0.7, running=draw.randrange(4))
