"""reasoning-gym: all generators; an answer is the right one, or words and numbers at random."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

SIZE = 400


def subject() -> Subject:
    """The adapter's tasks, each of another generator."""
    answers()
    return Subject(config=config, says=says, rewards=rewards)


def config(folder: Path) -> dict[str, Any]:
    """All generators."""
    return {
        "tasks": {
            "path": "agentrl.environments.reasoning_tasks:tasks",
            "args": {"size": SIZE},
            "max_prompt_tokens": 6000,
        },
        "reward": "agentrl.environments.reasoning_score:ReasoningScore",
        "agent_args": {"max_tokens": 300},
    }


def says(prompt: str, rng: random.Random) -> str:
    """The reference answer, or something that occurs in the question."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if rng.random() < 0.3:
        return answers().get(asked, "42")
    words = re.findall(r"\S+", prompt)[-200:]
    return " ".join(rng.choices(words, k=rng.randint(1, 3))) if rng.random() < 0.7 else str(rng.randint(0, 9))


@cache
def answers() -> dict[str, str]:
    """Question → reference answer."""
    from agentrl.environments.reasoning_tasks import tasks

    return {task["messages"][-1]["content"]: str(task.get("answer", "")) for task in tasks(size=SIZE)}


def rewards(episode: Episode) -> list[float]:
    """The library scores the answer to an item that it generates anew."""
    from agentrl.environments.reasoning_tasks import make

    about = episode["task"]["reasoning_gym"]
    dataset = make(about["name"], about["config"] | {"seed": about["seed"], "size": 500}, about["name"])
    entry = dataset[about["index"]]
    if entry["question"] != about["entry"]["question"]:  # four generators depend on the hash seed of their process
        from agentrl.environments.exact_json import decoded

        entry = decoded(about["entry"])
    try:
        return [float(dataset.score_answer(answer=episode["answers"][-1].strip(), entry=entry))]
    except ValueError:
        return [0.0]
