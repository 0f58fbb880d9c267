"""Held-out evaluation: every task once per setting, durable and resumable, apart from training data and admission."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import httpx

from agentrl.client import AsyncClient
from agentrl.config import RunConfig
from agentrl.rollout.agent import Agent, load_tasks
from agentrl.rollout.episode import play
from agentrl.rollout.progress import Progress
from agentrl.schemas import Json

ATTEMPTS = 3
"""Episodes of a task before a failing agent is left out (and counts as reward 0 in the summary)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to evaluate: which tasks, at which temperature (0 is greedy)."""

    name: str
    tasks: Sequence[Json]
    temperature: float


def settings_of(config: RunConfig) -> list[Setting]:
    """`sampled` and `greedy` on the held-out tasks, `unseen` on phrasings that training never shows."""
    evaluation = config.evaluation
    settings: list[Setting] = []
    if evaluation.tasks is not None:
        tasks = load_tasks(evaluation.tasks, limit=evaluation.size, field="evaluation.tasks")
        settings += [
            Setting(name="sampled", tasks=tasks, temperature=evaluation.temperature),
            Setting(name="greedy", tasks=tasks, temperature=0.0),
        ]
    if evaluation.unseen_tasks is not None:
        tasks = load_tasks(evaluation.unseen_tasks, limit=evaluation.size, field="evaluation.unseen_tasks")
        settings.append(Setting(name="unseen", tasks=tasks, temperature=evaluation.temperature))
    return settings


async def evaluate(
    client: AsyncClient,
    agent: Agent,
    settings: Sequence[Setting],
    *,
    when: str,
    owner: str,
    http: httpx.AsyncClient,
    timeout_s: float,
    max_concurrent: int,
    progress: Progress,
) -> None:
    """Play what is missing of evaluation `when` (`before` or `after`). Calling it again after a crash goes on."""
    run = await client.request("GET", "/api/run")
    step = int(run["published_step"])
    progress.phase = f"evaluation {when}"
    free = asyncio.Semaphore(max_concurrent)

    async def one(setting: Setting, index: int) -> None:
        request = {
            "is_eval": True,
            "owner": owner,
            "task": setting.tasks[index],
            "size": 1,
            "metadata": {"eval": when, "step": step, "setting": setting.name, "index": index},
            "sampling": {"temperature": setting.temperature},
        }
        async with free:
            for _ in range(ATTEMPTS):
                group = await client.request("POST", "/groups", request)
                episode = partial(
                    play,
                    client,
                    agent,
                    setting.tasks[index],
                    group["sessions"][0],
                    http=http,
                    timeout_s=timeout_s,
                    is_eval=True,
                )
                outcome = await progress.session(episode)
                if outcome.error is None:
                    return

    rows = await client.request("GET", f"/api/runs/{run['id']}/evaluations")
    async with asyncio.TaskGroup() as playing:
        for setting, index in missing(settings, when, step, rows):
            playing.create_task(one(setting, index))


def missing(settings: Sequence[Setting], when: str, step: int, rows: Sequence[Json]) -> Iterator[tuple[Setting, int]]:
    """`(setting, task index)` of every episode of `step` that no row reports as completed, or failed too often."""
    tries: Counter[tuple[str, int]] = Counter()
    for row in rows:
        if (row.get("eval"), row.get("step")) == (when, step):
            tries[row["setting"], row["index"]] += 1 if row["status"] == "failed" else ATTEMPTS
    for setting in settings:
        for index in range(len(setting.tasks)):
            if tries[setting.name, index] < ATTEMPTS:
                yield setting, index
