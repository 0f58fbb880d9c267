"""Gymnasium's toy text: what a player sees, which action an answer names, the sum of rewards."""

from __future__ import annotations

from typing import Any

import pytest
from gyms import needs_gyms

from agentrl.environments.toy_text import ACTIONS, ToyText, Walk, episodes
from agentrl.errors import UserError

pytestmark = [needs_gyms, pytest.mark.filterwarnings("ignore:.*overwriting")]
LAKE: dict[str, Any] = {"environment": "FrozenLake-v1", "settings": {"is_slippery": False}, "seed": 1}


def test_episodes_are_tasks_in_turn() -> None:
    found = list(episodes({"FrozenLake-v1": {"is_slippery": False}, "Taxi-v4": None}, size=4, seed=3))
    assert [task["environment"] for task in found] == ["FrozenLake-v1", "Taxi-v4"] * 2
    assert [task["settings"] for task in found[:2]] == [{"is_slippery": False}, {}]
    assert len({task["seed"] for task in found}) == 4
    assert found[0]["seed"] == next(episodes("FrozenLake-v1", seed=3))["seed"]


def test_the_player_is_marked_where_the_library_uses_colours() -> None:
    walk = Walk(LAKE)
    assert walk.shown == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert walk.step("I go RIGHT.") == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert "There is no action in your answer" in walk.step("jump, rightly")
    assert not walk.done


def test_the_last_action_of_an_answer_counts_and_rewards_add_up() -> None:
    walk = Walk(LAKE)
    for action in ("right, no: down", "down", "right", "right", "down", "right"):
        assert not walk.done
        walk.step(action)
    assert walk.done
    assert walk.terminated
    assert walk.total == 1.0
    walk = Walk(LAKE)
    for _ in range(100):  # the library's limit
        walk.step("left")
    assert (walk.done, walk.terminated) == (True, False)
    assert Walk({"environment": "Taxi-v4", "settings": {}, "seed": 3}).step("dropoff")


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_named_environments_have_so_many_actions(kind: str) -> None:
    version = {"Taxi": "v4"}.get(kind, "v1")
    walk = Walk({"environment": f"{kind}-{version}", "settings": {}, "seed": 1})
    assert walk.actions == ACTIONS[kind]
    assert walk.step(walk.actions[-1])


def test_other_environments_have_numbers_or_names_for_their_actions() -> None:
    assert Walk({"environment": "CartPole-v1", "settings": {}, "seed": 1}).actions == ("0", "1")
    with pytest.raises(UserError, match="has 2 actions to choose from, 3 have a name"):
        Walk({"environment": "CartPole-v1", "settings": {}, "seed": 1}, ["a", "b", "c"])
    with pytest.raises(UserError, match="has 0 actions to choose from"):
        Walk({"environment": "Pendulum-v1", "settings": {}, "seed": 1})


def test_wrong_settings_are_named() -> None:
    with pytest.raises(UserError, match=r"Gymnasium has no 'FrozenLak-v1'; did you mean 'FrozenLake-v1'\?"):
        next(episodes("FrozenLak-v1"))
    with pytest.raises(UserError, match="names no environment"):
        next(episodes([]))
    with pytest.raises(UserError, match="max_turns: must be at least 1, got 0"):
        ToyText(max_turns=0)
