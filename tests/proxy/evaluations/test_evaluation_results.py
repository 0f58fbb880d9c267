"""Results of evaluations: the versions that sampled, intervals, votes, and rolled-back versions."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from databases import KINDS
from serving import add_version

from agentrl.client import AsyncClient
from agentrl.configs.evaluation_config import EvalSampling
from agentrl.rollout.held_out import Evaluator, Setting
from agentrl.rollout.http import agent_http
from agentrl.rollout.score import Result, Reward
from agentrl.rollout.worker_display import Progress
from agentrl.store import evaluation_episodes, runs
from agentrl.store.tables import (
    weight_versions,
)

from .evaluated_run import EVALUATION, Run, config


@pytest.fixture
async def evaluator(folder: Path) -> AsyncIterator[Any]:
    """Make an evaluator of a run, with an agent of the test's."""
    async with agent_http(20) as http:
        clients: list[AsyncClient] = []

        def make(run: Run, agent: Any, tasks: int, owner: str = "me/1", samples: int = 1, **options: Any) -> Evaluator:
            clients.append(AsyncClient(run.url, "run-key", timeout_s=20))
            setting = Setting(name="s", tasks=[{"n": n} for n in range(tasks)], sampling=EvalSampling(temperature=1.0))
            return Evaluator(
                clients[-1],
                agent,
                [setting],
                samples=samples,
                every=None,
                owner=owner,
                http=http,
                timeout_s=20,
                progress=Progress(),
                **{"max_concurrent": 4} | options,
            )

        yield make
        for client in clients:
            await client.aclose()


class Calling:
    """Makes a call in each episode, and does something before the n-th."""

    def __init__(self, before: dict[int, Callable[[], None]] | None = None) -> None:
        self.before, self.episodes = before or {}, 0

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        self.before.get(self.episodes, lambda: None)()
        self.episodes += 1
        answer = await extra["http_client"].post(
            extra["base_url"] + "/chat/completions",
            json={"model": "default", "messages": [{"role": "user", "content": str(data["n"])}]},
            headers={"Authorization": "Bearer " + extra["api_key"]},
        )
        answer.raise_for_status()
        return 1.0


async def test_weights_that_are_published_meanwhile_are_reported(start: Any, evaluator: Any) -> None:
    with start(config(**EVALUATION)) as run:
        (run.folder / "v7").mkdir()

        def publish() -> None:
            add_version(run.database, run.id, 7, run.folder / "v7")
            run.publish(7)

        playing = evaluator(run, Calling({2: lambda: threading_run(publish)}), 4, max_concurrent=1)
        await playing.evaluate(0, 0)
        (found,) = run.evaluations()
        result = found["settings"]["s"]
        assert (found["step"], found["version"], result["version_min"], result["version_max"]) == (0, 0, 0, 7)
        rows = run.get("evaluations/episodes?version=0")
        assert [(row["evaluation"]["index"], row["version_min"]) for row in rows] == [(0, 0), (1, 0), (2, 7), (3, 7)]


def threading_run(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Stochastic:
    """An environment with tasks of differing hardness, and chance in each episode, all from a seed."""

    def __init__(self, seed: int, scale: int) -> None:
        self.random, self.scale = random.Random(seed), scale

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        hardness = random.Random(data["n"]).betavariate(1.5, 1.5)
        return round(self.scale * (self.random.random() < hardness) * self.random.choice([0.5, 1.0])) / self.scale


@pytest.mark.parametrize(
    ("samples", "scale"),
    [pytest.param(1, 1, marks=pytest.mark.long), (1, 2), pytest.param(4, 2, marks=pytest.mark.long)],
)
async def test_the_interval_covers_the_value_of_a_repeated_evaluation(
    start: Any, evaluator: Any, samples: int, scale: int
) -> None:
    with start(config(**EVALUATION)) as run:
        (run.folder / "v1").mkdir()
        for version, seed in ((0, 5), (1, 6)):
            if version:
                add_version(run.database, run.id, 1, run.folder / "v1")
            agent = Stochastic(seed, scale)
            await evaluator(run, agent, 24, samples=samples, max_concurrent=1).evaluate(version, version)
        first, again = (one["settings"]["s"] for one in run.evaluations())
        assert first["reward"] != again["reward"]
        assert first["low"] <= again["reward"] <= first["high"]
        assert 0.05 < first["high"] - first["low"] < 0.5
        assert first["episodes"] == 24 * samples


class Voter:
    """Two of three samples agree: on the right answer for even tasks, on a wrong one for odd tasks."""

    def __init__(self) -> None:
        self.played = Counter[int]()

    async def run(self, data: dict[str, Any], **extra: Any) -> Result:
        self.played[data["n"]] += 1
        right = (self.played[data["n"]] < 3) == (data["n"] % 2 == 0)
        return Result(rewards=(Reward(value=float(right)),), answer=42 if right else "no")


async def test_the_answers_of_the_samples_vote(start: Any, evaluator: Any) -> None:
    with start(config(**EVALUATION)) as run:
        await evaluator(run, Voter(), 3, samples=3, max_concurrent=1).evaluate(0, 0)
        (found,) = run.evaluations()
        samples = found["settings"]["s"]["samples"]
        assert samples["maj"] == {"1": pytest.approx(5 / 9), "2": pytest.approx(5 / 9), "3": pytest.approx(2 / 3)}
        rows = run.database.query(evaluation_episodes.episodes, run.id)
        assert Counter(row["answer"] for row in rows) == {"42": 5, "no": 4}


@pytest.mark.long_on("postgresql")
@pytest.mark.parametrize("kind", KINDS)
async def test_rolled_back_versions_have_no_result_and_a_summary_reads_the_newest(
    start: Any, evaluator: Any, kind: str
) -> None:
    with start(config(**EVALUATION), kind) as run:
        async with AsyncClient(run.url, "run-key", timeout_s=20) as client:
            for version in range(1, 5):
                add_version(run.database, run.id, version, run.folder)
            with run.database.write() as conn:
                change, number = weight_versions.update(), weight_versions.c.version
                conn.execute(change.where(number > 0).values(created_at=time.time()))
                conn.execute(change.where(number == 2).values(state="rolled_back"))
                conn.execute(change.where(number == 3).values(step=2))  # again
                conn.execute(runs.runs.update().values(published_step=4, current_version=4))
            for step, version in ((0, 0), (2, 2), (2, 3), (4, 4)):
                await evaluator(run, Calling(), 2).evaluate(step, version)
            await client.request("POST", "/groups", {"is_eval": True, "task": {}, "metadata": {"evaluation": "mine"}})
            assert [(one["step"], one["version"]) for one in run.evaluations()] == [(0, 0), (2, 3), (4, 4)]
            status = await client.request("GET", "/api/status")
            assert [(one["step"], one["ended"]) for one in status["evaluations"]] == [(2, 2), (4, 2)]
