"""verifiers: a taskset with two rewards and a metric, as an environment of its hub is written."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from adapted.subject import Episode, Subject

PYTHON = Path(__file__).parents[2] / ".venv-verifiers" / "bin" / "python"
TASKSET = """
import verifiers.v1 as vf


class BackwardsData(vf.TaskData):
    word: str


class BackwardsTask(vf.Task[BackwardsData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.word[::-1])

    @vf.reward(weight=0.5)
    async def close(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        return sum(a == b for a, b in zip(self.data.word[::-1], reply)) / len(self.data.word)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class BackwardsConfig(vf.TasksetConfig):
    count: int = 40


class Backwards(vf.Taskset[BackwardsTask, BackwardsConfig]):
    def load(self):
        for number in range(self.config.count):
            word = "".join(chr(97 + (number * step) % 26) for step in (3, 5, 7, 11))
            yield BackwardsTask(BackwardsData(prompt=f"Say it backwards: {word}", word=word), self.config.task)


__all__ = ["Backwards"]
"""


def subject() -> Subject:
    """Words backwards, often with a wrong letter."""
    return Subject(config=config, says=says, rewards=rewards, files={"backwards.py": TASKSET})


def config(folder: Path) -> dict[str, Any]:
    """The taskset beside the config."""
    args = {"python": str(PYTHON), "taskset": {"id": "backwards"}}
    return {
        "agent": "agentrl.environments.foreign:Verifiers",
        "agent_args": args | {"traces": "traces.jsonl"},
        "tasks": {"path": "agentrl.environments.foreign:verifiers_tasks", "args": args},
    }


def says(prompt: str, rng: random.Random) -> str:
    """The word backwards, or almost."""
    asked = re.findall(r"backwards: ([a-z]+)", prompt)
    word = asked[-1][::-1] if asked else "none"
    return word if rng.random() < 0.4 else word[: rng.randint(0, 3)] + "x"


def rewards(episode: Episode) -> list[float]:
    """The reward of the library's own record of the session."""
    return [
        sum(one["score"] * one["weight"] for trace in record["traces"] for one in trace["rewards"].values())
        for record in records(str(episode["folder"] / "traces.jsonl"))
        if record["session_id"] == episode["id"]
    ]


def records(file: str) -> list[dict[str, Any]]:
    """The library's records."""
    return [json.loads(text) for text in Path(file).read_text().splitlines()]
