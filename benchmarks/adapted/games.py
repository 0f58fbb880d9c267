"""TextArena: games of one and of two players, the policy on both seats."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

GAMES = ("TicTacToe-v0", "GuessTheNumber-v0", "KuhnPoker-v0", "Nim-v0", "PigDice-v0-50", "Mastermind-v0")


def subject() -> Subject:
    """Random moves, most of them legal."""
    return Subject(config=config, says=says, rewards=rewards)


def config(folder: Path) -> dict[str, Any]:
    """Self-play of several games."""
    return {
        "agent": "agentrl.environments.text_games:TextArena",
        "tasks": {"path": "agentrl.environments.text_games:games", "args": {"games": list(GAMES), "size": 600}},
    }


def says(prompt: str, rng: random.Random) -> str:
    """One of the moves in brackets that the prompt names last, or a guess."""
    named = re.findall(r"\[[^\]\n]{1,12}\]", prompt)
    if "Guess The Number" in prompt:
        return f"I guess [{rng.randint(1, 20)}]"
    if "Nim" in prompt:
        return f"[{rng.randint(0, 2)} {rng.randint(1, 3)}]"
    if "Mastermind" in prompt:
        return f"[{' '.join(str(n) for n in rng.sample(range(1, 7), 4))}]"
    return rng.choice(named[-9:]) if named else "pass"


def rewards(episode: Episode) -> list[float]:
    """TextArena alone, with each player's recorded moves."""
    import textarena

    task, children = episode["task"], episode["children"]
    said = {child["metadata"]["player"]: list(child["answers"]) for child in children}
    (ours,) = set(range(task["players"])) - said.keys()
    said[ours] = list(episode["answers"])
    random.seed(task["seed"])
    env = textarena.make(task["game"], **task["settings"])
    env.reset(num_players=task["players"], seed=task["seed"])
    done = False
    while not done:
        player, _ = env.get_observation()
        done, _ = env.step(said[player].pop(0))
    given, _ = env.close()
    assert not any(said.values())
    return [float(given[player]) for player in (ours, *(child["metadata"]["player"] for child in children))]
