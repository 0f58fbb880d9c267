"""Games that take turns in one process do not draw each other's random numbers."""

from __future__ import annotations

import random

import numpy as np

from agentrl.environments.random_state import RandomState


def draw(state: RandomState) -> tuple[float, float]:
    with state.active():
        return random.random(), float(np.random.random())


def test_games_that_take_turns_draw_what_each_draws_alone() -> None:
    alone = [[draw(state) for _ in range(3)] for state in (RandomState(1), RandomState(2))]
    one, two = RandomState(1), RandomState(2)
    turns = [(draw(one), draw(two)) for _ in range(3)]
    assert [list(drawn) for drawn in zip(*turns, strict=True)] == alone


def test_the_state_of_the_process_is_kept() -> None:
    before, numpy = random.getstate(), repr(np.random.get_state())
    draw(RandomState(3))
    assert random.getstate() == before
    assert repr(np.random.get_state()) == numpy
