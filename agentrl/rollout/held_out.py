"""Runs held-out evaluations on schedule, beside training rollouts. Durable, resumable, and shared by all workers.

    follow: due step? ── its version ── missing episodes? ── claim ──► run ──► reward, end
              ▲                               ▲                 │ 409: claimed by another worker
              └────── all episodes done ◄─────┴─────────────────┘

The proxy knows which episodes are done, so any worker can continue after another dies. Evaluation sessions are never
trained and do not count for admission.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.client import AsyncClient
from agentrl.configs.evaluation_config import UNSEEN, EvalSampling
from agentrl.configs.run_config import RunConfig
from agentrl.data.task_stream import load_tasks
from agentrl.domain.evaluation import ATTEMPTS, Episode, Label, Tries, newest_due, tries
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode import Places, play
from agentrl.rollout.http import AgentHttp
from agentrl.rollout.pace import Pace, RunFailed, check
from agentrl.rollout.runner import is_finished, sessions_of
from agentrl.rollout.worker_display import Progress

LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """An evaluation setting: its tasks, its sampling, and the source of each task if there are several sources."""

    name: str
    tasks: Sequence[Json]
    sampling: EvalSampling
    sources: Sequence[str] = ()


def settings_of(config: RunConfig) -> list[Setting]:
    """The configured settings on the held-out tasks, plus `unseen` on the unseen tasks."""
    evaluation = config.evaluation
    settings: list[Setting] = []
    if evaluation.tasks is not None:
        tasks, sources = _tasks_of(evaluation.tasks, "evaluation.tasks", config)
        settings += [
            Setting(name=name, tasks=tasks, sources=sources, sampling=how) for name, how in evaluation.settings.items()
        ]
    if evaluation.unseen_tasks is not None:
        tasks, sources = _tasks_of(evaluation.unseen_tasks, "evaluation.unseen_tasks", config)
        how = evaluation.settings[evaluation.main_setting]
        settings.append(Setting(name=UNSEEN, tasks=tasks, sources=sources, sampling=how))
    return settings


def _tasks_of(value: Any, field: str, config: RunConfig) -> tuple[list[Json], list[str]]:
    """The first tasks of each source, and the source of each task if there are several sources."""
    found = load_tasks(value, limit=config.evaluation.size, field=field, storage=config.storage)
    named = [(task, source) for source, tasks in found.items() for task in tasks]
    return [task for task, _ in named], [source for _, source in named if len(found) > 1]


class Evaluator:
    """Runs the evaluations that are due. `progress` shows the current one."""

    def __init__(
        self,
        client: AsyncClient,
        agent: Agent | Places,
        settings: Sequence[Setting],
        *,
        samples: int,
        every: int | None,
        owner: str,
        http: AgentHttp,
        timeout_s: float,
        max_concurrent: int,
        progress: Progress,
    ) -> None:
        self.client, self.agent, self.owner, self.progress = client, agent, owner, progress
        self.settings = {setting.name: setting for setting in settings}
        self.samples, self.every = samples, every
        self._play = partial(play, http=http, timeout_s=timeout_s, is_eval=True)
        self._free = asyncio.Semaphore(max_concurrent)
        self._pace = Pace(progress)
        self._played = Counter[tuple[int, Episode]]()  # (version, episode) → how often this worker ran it
        self._ended: set[tuple[int, Episode]] = set()  # episodes with a result, possibly not yet visible in the store
        self._over: set[int] = set()  # fully evaluated versions

    async def follow(self) -> None:
        """Run each evaluation that becomes due, until the run is finished and its last step evaluated. Raises
        RunFailed.
        """
        while self.settings:
            run = await self.client.request("GET", "/api/run")
            if run["status"] == "failed":
                raise RunFailed(f"run {run['name']} failed: {run['error']}")
            if not await self.catch_up(run):
                if is_finished(run):
                    return
                await asyncio.sleep(LOOK_S)

    async def catch_up(self, run: Json) -> bool:
        """Run the evaluation that is due for `run` (`GET /api/run`). Returns whether one was due."""
        step = newest_due(self.every, int(run["steps"]), int(run["published_step"]))
        if step is None or not self.settings:
            return False
        version = await self._version_of(step, run)
        if version is None or version in self._over:
            return False
        await self.evaluate(step, version)
        return True

    async def _version_of(self, step: int, run: Json) -> int | None:
        """The version that a published step of the surviving lineage produced; None while the step is being rolled
        back.
        """
        if step == 0:
            return 0
        rows = await self.client.request("GET", f"/api/runs/{run['id']}/steps?after={step - 1}")
        return next((row["version_after"] for row in rows if (row["step"], row["state"]) == (step, "published")), None)

    async def evaluate(self, step: int, version: int) -> None:
        """Run the missing episodes of an evaluation; returns when all episodes are done, also those of
        other workers.
        """
        run_id = (await self.client.request("GET", "/api/run"))["id"]
        rows_of = f"/api/runs/{run_id}/evaluations/episodes?version={version}"
        episodes = list(self._episodes())
        self.progress.phase = f"evaluation of step {step}"
        while todo := list(missing(episodes, await self.client.request("GET", rows_of))):
            mine = [(episode, had) for episode, had in todo if not self._is_over(version, episode)]
            if not mine:
                break
            async with asyncio.TaskGroup() as playing:
                got = [
                    playing.create_task(self._episode(self._label(step, version, episode, len(episodes)), had))
                    for episode, had in mine
                ]
            if not any(task.result() for task in got):
                await asyncio.sleep(LOOK_S)
        self._over.add(version)

    def _episodes(self) -> Iterator[Episode]:
        for setting in self.settings.values():
            for index in range(len(setting.tasks)):
                for sample in range(self.samples):
                    yield Episode(setting.name, index, sample)

    def _label(self, step: int, version: int, episode: Episode, episodes: int) -> Label:
        sources = self.settings[episode.setting].sources
        return Label(step, version, episode, episodes, sources[episode.index] if sources else None)

    def _is_over(self, version: int, episode: Episode) -> bool:
        """Whether the episode has a result here, or has been run often enough for the store to show its end."""
        key = (version, episode)
        return key in self._ended or self._played[key] >= 2 * ATTEMPTS

    async def _episode(self, label: Label, had: Tries) -> bool:
        """Run the episode once; False when another worker has claimed it. The proxy has the result."""
        key = (label.version, label.episode)
        async with self._free:
            await self._pace.wait()
            try:
                group = await self.client.request("POST", "/groups", self._start(label, had))
            except RequestError as refused:
                check(refused)
                if refused.code == "claimed":
                    return False
                raise
            task, session = group["task"]["data"], sessions_of(group)[0]
            outcome = await self.progress.session(partial(self._play, self.client, self.agent, task, session))
        self._pace.saw([outcome])
        self._played[key] += 1
        if outcome.error is None:
            self._ended.add(key)
        return True

    def _start(self, label: Label, had: Tries) -> Json:
        setting = self.settings[label.episode.setting]
        return {
            "is_eval": True,
            "owner": self.owner,
            "task": setting.tasks[label.episode.index],
            "metadata": label.metadata,
            "sampling": setting.sampling.model_dump(exclude_none=True),
            "claim": label.episode.claim(label.version, max(had.ended, self._played[label.version, label.episode])),
        }


def missing(episodes: Iterable[Episode], rows: Iterable[Json]) -> Iterator[tuple[Episode, Tries]]:
    """The episodes that are not done, each with its attempts so far, from the proxy's rows of the evaluation."""
    known = tries(rows)
    for episode in episodes:
        had = known.get(episode, Tries())
        if not had.over:
            yield episode, had
