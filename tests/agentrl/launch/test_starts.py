"""Each engine has its time to start, at every start."""

from __future__ import annotations

import pytest

from agentrl.errors import EngineUnavailable
from agentrl.launch.starts import Starts

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_serving_engine_does_not_extend_the_start_of_another() -> None:
    clock = Clock()
    starts = Starts(300.0, clock)
    starts.started(A)
    starts.started(B)
    clock.now = 299.0
    starts.check({A: "serving"})
    clock.now = 301.0
    with pytest.raises(EngineUnavailable, match=r":2 is not serving 300 s after its start"):
        starts.check({A: "serving", B: "dead"})


def test_a_restarted_engine_has_its_full_start_time_again() -> None:
    clock = Clock()
    starts = Starts(300.0, clock)
    starts.started(A)
    clock.now = 10.0
    starts.check({A: "updating"})
    clock.now = 1000.0
    starts.check({A: "dead"})
    starts.started(A)
    starts.check({A: "serving"})  # what the store still says
    clock.now = 1100.0
    starts.check({A: "dead"})
    clock.now = 1301.0
    with pytest.raises(EngineUnavailable):
        starts.check({A: "dead"})
