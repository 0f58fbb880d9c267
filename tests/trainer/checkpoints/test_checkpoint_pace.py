"""How often `checkpoint_every: auto` writes a checkpoint."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.checkpoints.checkpoint_pace import MOST, SHARE, CheckpointPace

SECONDS = st.floats(0.001, 10_000)


def ran(pace: CheckpointPace, step_s: list[float], write_s: float) -> list[int]:
    """The steps with a checkpoint, each written in `write_s`."""
    due = []
    for number, taken_s in enumerate(step_s, 1):
        if pace.stepped(number, taken_s):
            due.append(number)
            pace.begun()
            pace.written(write_s)
    return due


@given(st.lists(SECONDS, min_size=1, max_size=300), SECONDS)
def test_writing_takes_a_bounded_share_and_no_stretch_is_long(step_s: list[float], write_s: float) -> None:
    due = ran(CheckpointPace("auto"), step_s, write_s)
    assert due[0] == 1
    for before, after in pairwise(due):
        between_s = sum(step_s[before:after])
        assert after - before <= MOST
        assert write_s <= SHARE * between_s * (1 + 1e-9) or after - before == MOST
        assert after - before == 1 or sum(step_s[before : after - 1]) < write_s / SHARE


def test_a_number_is_a_number_of_steps() -> None:
    assert ran(CheckpointPace(3), [1.0] * 9, 1e9) == [3, 6, 9]


def test_only_a_run_in_which_every_step_leaves_a_checkpoint_waits_for_it() -> None:
    assert CheckpointPace(1).waits
    assert not CheckpointPace(2).waits
    assert not CheckpointPace("auto").waits


def test_no_step_waits_for_a_slow_write() -> None:
    pace = CheckpointPace("auto")
    assert pace.stepped(1, 1.0)
    pace.begun()
    assert [pace.stepped(number, 1e6) for number in range(2, MOST + 1)] == [False] * (MOST - 1)
    assert pace.stepped(MOST + 1, 1.0)  # it is waited for at last: the next steps may be lost


def test_what_a_write_took_counts_when_it_is_done() -> None:
    pace = CheckpointPace("auto", write_s=1.0)
    assert pace.stepped(1, 20.0)
    pace.begun()
    assert not pace.stepped(2, 10.0)
    pace.written(0.4)
    assert pace.stepped(3, 1.0)
