"""Gymnasium's toy text environments."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

TURNS = 30
ENVIRONMENTS: dict[str, Any] = {
    "FrozenLake-v1": {"is_slippery": True},
    "CliffWalking-v1": {},
    "Taxi-v4": {},
    "Blackjack-v1": {},
}


def subject() -> Subject:
    """Random actions."""
    return Subject(config=config, says=says, rewards=rewards)


def config(folder: Path) -> dict[str, Any]:
    """Four environments."""
    return {
        "agent": "agentrl.environments.toy_text:ToyText",
        "agent_args": {"max_turns": TURNS},
        "tasks": {"path": "agentrl.environments.toy_text:episodes", "args": {"environments": ENVIRONMENTS}},
    }


def says(prompt: str, rng: random.Random) -> str:
    """An action of the first message, or none."""
    listed = re.search(r"Answer with one action: ([a-z, ]+)\.", prompt)
    assert listed is not None
    return rng.choice([*listed[1].split(", "), "I do not know."])


def rewards(episode: Episode) -> list[float]:
    """Gymnasium alone, with the recorded actions."""
    import gymnasium

    from agentrl.environments.toy_text import ACTIONS

    task = episode["task"]
    names = ACTIONS[task["environment"].partition("-")[0]]
    env = gymnasium.make(task["environment"], **task["settings"])
    env.reset(seed=task["seed"])
    steps = [env.step(names.index(answer)) for answer in episode["answers"] if answer in names]
    assert len(episode["answers"]) == TURNS or steps[-1][2] or steps[-1][3]
    return [float(sum(step[1] for step in steps))]
