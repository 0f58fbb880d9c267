"""The parts of a step's time, and what bounds a run."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.store.views.results import step_time

PARTS = {"read": 0.1, "build": 0.2, "forward": 2.0, "backward": 4.0, "update": 0.5, "other": 0.2}
MEASURED = {
    "time/wait_for_batch": 3.0,
    "time/wait_for_policy": 1.0,
    "time/train": 7.0,
    **{f"time/{name}": value for name, value in PARTS.items()},
    "time/checkpoint": 2.5,
    "time/write_version": 2.0,
    "loss": 7.0,
}


def test_the_parts_add_up_to_a_step_and_none_counts_twice() -> None:
    found = step_time.parts(MEASURED)
    assert list(found) == [name for name in step_time.PARTS if name != "train"]
    assert found["checkpoint"] == 0.5  # measured with the version
    assert sum(found.values()) == pytest.approx(3 + 7 + 2.5 + 1)


def test_a_step_of_which_less_was_measured_shows_that() -> None:
    assert step_time.parts({"time/train": 7.0, "time/read": None, "time/checkpoint": 1.0}) == {
        "train": 7.0,
        "checkpoint": 1.0,
    }
    assert step_time.parts({"loss": 1.0}) == {}
    assert step_time.parts({"time/checkpoint": 1.0, "time/write_version": 2.0})["checkpoint"] == 0.0


@pytest.mark.parametrize(
    ("parts", "stage", "said"),
    [
        (
            {"wait_for_batch": 6.0, "train": 3.0, "checkpoint": 1.0},
            "agents",
            "waits for batches in 60% of a step's time",
        ),
        ({"wait_for_batch": 1.0, "forward": 3.0, "backward": 4.0}, "trainer", "(resources.trainer.ranks)"),
        ({"train": 3.0, "write_version": 2.0, "wait_for_policy": 2.0}, "publish", "(publish.prepare)"),
        ({"train": 3.0, "checkpoint": 4.0}, "checkpoint", "trainer.checkpoint_every: auto"),
    ],
)
def test_the_stage_that_takes_the_most_time_bounds_the_run(parts: dict[str, float], stage: str, said: str) -> None:
    found = step_time.bound([{"wait_for_batch": 1e9}, *[parts] * step_time.RECENT])  # older steps do not count
    assert found is not None
    assert found.stage == stage
    assert said in found.text
    assert found.text.count("\n") == 0


def test_without_measurements_nothing_bounds_the_run() -> None:
    assert step_time.bound([]) is None
    assert step_time.bound([{}, {}]) is None
    assert step_time.means([{"read": 1.0}, {}]) == {"read": 0.5}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"stall_s": {"http://a": 0.5, "http://b": 1}}, [0.5, 1.0]),
        ({"stall_s": 0.25}, [0.25]),
        ({"stall_s": "x"}, []),
        ({"stall_s": {"a": None, "b": True}}, []),
        ({}, []),
    ],
)
def test_stalls_are_read_from_any_publish(facts: dict[str, Any], expected: list[float]) -> None:
    assert step_time.stalls(facts) == expected
