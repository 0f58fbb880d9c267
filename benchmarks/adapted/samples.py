"""inspect-ai: a task with two scorers; the library's logs say what it scored."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

PYTHON = Path(__file__).parents[2] / ".venv-inspect" / "bin" / "python"
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.solver import generate

WORDS = ["".join(chr(97 + (n * step) % 26) for step in (3, 5, 7, 11)) for n in range(40)]


@scorer(metrics=[accuracy()])
def close():
    async def score(state, target):
        same = sum(a == b for a, b in zip(target.text, state.output.completion))
        return Score(value=same / len(target.text))

    return score


@task
def backwards():
    samples = [Sample(input=f"Say it backwards: {word}", target=word[::-1]) for word in WORDS]
    return Task(dataset=samples, solver=generate(), scorer=[includes(), close()])
"""
CORRECT = {"C": 1.0, "I": 0.0}


def subject() -> Subject:
    """Words backwards, often with a wrong letter."""
    return Subject(config=config, says=says, rewards=rewards, files={"backwards_task.py": TASK})


def config(folder: Path) -> dict[str, Any]:
    """The task in the run's folder."""
    args = {"python": str(PYTHON), "task": "backwards_task.py@backwards"}
    kept = {"log_dir": str(folder / "logs"), "eval_args": {"log_format": "json"}}
    return {
        "agent": "agentrl.environments.foreign:InspectAI",
        "agent_args": args | kept,
        "tasks": {"path": "agentrl.environments.foreign:inspect_tasks", "args": args},
    }


def says(prompt: str, rng: random.Random) -> str:
    """The word backwards, or almost."""
    word = re.findall(r"backwards: ([a-z]+)", prompt)[-1][::-1]
    return word if rng.random() < 0.4 else word[: rng.randint(0, 3)] + "x"


def rewards(episode: Episode) -> list[float]:
    """The scores in the library's log of the session."""
    scores = logged(str(episode["folder"] / "logs"))[episode["id"]]
    return [CORRECT[scores["includes"]["value"]] + scores["close"]["value"]]


@cache
def logged(folder: str) -> dict[str, Any]:
    """Session → the scores of its sample, from the library's logs."""
    logs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {log["eval"]["metadata"]["session_id"]: log["samples"][0]["scores"] for log in logs}
