"""TextArena's games as tasks: seeds, numbers of players, names; a game repeats from its seed."""

from __future__ import annotations

from typing import Any

import pytest
from gyms import needs_gyms

from agentrl.environments.text_games import Game, TextArena, games, seat_by_lot
from agentrl.errors import UserError

pytestmark = needs_gyms


def test_games_are_tasks_in_turn() -> None:
    found = list(games(["TicTacToe-v0", "GuessTheNumber-v0-raw"], size=4, seed=3))
    assert [task["game"] for task in found] == ["TicTacToe-v0-raw", "GuessTheNumber-v0-raw"] * 2
    assert [task["players"] for task in found] == [2, 1, 2, 1]
    assert len({task["seed"] for task in found}) == 4
    assert found == list(games(["TicTacToe-v0", "GuessTheNumber-v0"], size=4, seed=3))
    assert found != list(games(["TicTacToe-v0", "GuessTheNumber-v0"], size=4, seed=4))


def test_a_game_has_settings_and_a_number_of_players() -> None:
    (task,) = games({"GuessTheNumber-v0": {"max_number": 5}}, size=1)
    assert task["settings"] == {"max_number": 5}
    assert "between 1 and 5" in Game(task["game"], task["settings"], 1, 1).observation()[1]
    (task,) = games("ThreePlayerTicTacToe-v0", size=1)
    assert task["players"] == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"games": "TicTacTo-v0"}, "TextArena has no 'TicTacTo-v0'; did you mean 'TicTacToe-v0-raw'?"),
        ({"games": []}, "names no game"),
        ({"games": {"TicTacToe-v0": {"size": 9}}}, "TicTacToe-v0-raw cannot be started: TypeError"),
    ],
)
def test_a_wrong_game_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        next(games(**args))


def test_a_player_sees_what_is_new_and_not_its_own_words() -> None:
    game = Game("TicTacToe-v0-raw", {}, 2, 1)
    player, shown = game.observation()
    assert player == 0
    assert shown.startswith("You are Player 0 in Tic Tac Toe.")
    game.step("[4]")
    player, shown = game.observation()
    assert player == 1
    assert "[Player 0] [4]" in shown
    game.step("[0]")
    player, shown = game.observation()
    assert "You are Player" not in shown
    assert "[Player 0]" not in shown
    assert "[Player 1] [0]" in shown


def test_games_that_take_turns_are_the_games_of_their_seeds() -> None:
    def played(*started: Game) -> list[list[str]]:
        seen: list[list[str]] = [[] for _ in started]
        while not all(game.done for game in started):
            for game, words in zip(started, seen, strict=True):
                if not game.done:
                    words.append(game.observation()[1])
                    game.step("[roll]")
        return seen

    alone = [played(Game("PigDice-v0-50-raw", {}, 2, seed))[0] for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert played(*(Game("PigDice-v0-50-raw", {}, 2, seed) for seed in (1, 2))) == alone


def test_the_seat_of_a_session_is_chosen_by_its_id() -> None:
    seats = [seat_by_lot(f"http://127.0.0.1:80/sessions/{number}/v1", 2) for number in range(100)]
    assert 30 < sum(seats) < 70
    assert seats == [seat_by_lot(f"http://other/sessions/{number}/v1", 2) for number in range(100)]


def test_moves_are_bounded() -> None:
    with pytest.raises(UserError, match="max_moves: must be at least 1, got 0"):
        TextArena(max_moves=0)
