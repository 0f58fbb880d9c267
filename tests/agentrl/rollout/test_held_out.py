"""Evaluations are played on schedule, once, whoever plays and dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.configs.evaluation_config import EvalSampling
from agentrl.domain.evaluation import ATTEMPTS, Label
from agentrl.rollout import held_out, pace
from agentrl.rollout.held_out import Evaluator, Setting, settings_of
from agentrl.rollout.http import AgentHttp, agent_http
from agentrl.rollout.worker_display import Progress

TASKS = [{"n": 0}, {"n": 1}, {"n": 2}]
SETTINGS = [
    Setting(name="sampled", tasks=TASKS, sampling=EvalSampling(temperature=0.7, top_p=0.9)),
    Setting(name="greedy", tasks=TASKS[:1], sampling=EvalSampling(temperature=0.0)),
]
EPISODES = {("sampled", index, sample): 1 for index in range(3) for sample in range(2)} | {
    ("greedy", 0, sample): 1 for sample in range(2)
}


class Agent:
    """Counts what it plays; `act` may raise or wait."""

    def __init__(self, act: Callable[[dict[str, Any]], Any] = lambda data: 1.0) -> None:
        self.act, self.played = act, Counter[int]()

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        assert extra["is_eval"]
        self.played[data["n"]] += 1
        result = self.act(data)
        return float(await result if asyncio.iscoroutine(result) else result)


@pytest.fixture
async def http() -> AsyncIterator[AgentHttp]:
    async with agent_http(5) as made:
        yield made


@pytest.fixture
async def worker(proxy: Any, http: AgentHttp, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    monkeypatch.setattr(held_out, "LOOK_S", 0.02)
    monkeypatch.setattr(pace, "FIRST_S", 0.0)
    async with AsyncClient(proxy.url, "k", timeout_s=30) as client:

        def make(agent: Agent, owner: str = "me/1", every: int | None = None, at_once: int = 2) -> Evaluator:
            return Evaluator(
                client,
                agent,
                SETTINGS,
                samples=2,
                every=every,
                owner=owner,
                http=http,
                timeout_s=120,
                max_concurrent=at_once,
                progress=Progress(),
            )

        yield make


def sessions(proxy: Any, *statuses: str) -> list[tuple[Label, dict[str, Any]]]:
    found = [(Label.of(session["metadata"]), session) for session in proxy.sessions.values()]
    return [(label, session) for label, session in found if label is not None and session["status"] in statuses]


def completed(proxy: Any, version: int) -> Counter[tuple[str, int, int]]:
    labels = [label.episode for label, _ in sessions(proxy, "completed") if label.version == version]
    return Counter((e.setting, e.index, e.sample) for e in labels)


async def run_of(worker: Evaluator) -> dict[str, Any]:
    run: dict[str, Any] = await worker.client.request("GET", "/api/run")
    return run


async def test_every_sample_is_played_once_as_its_setting_says(proxy: Any, worker: Any) -> None:
    playing = worker(Agent())
    assert await playing.catch_up(await run_of(playing))
    assert completed(proxy, 0) == EPISODES
    assert {(label.step, label.episodes) for label, _ in sessions(proxy, "completed")} == {(0, 8)}
    asked = {(label.episode.setting, *s["metadata"]["sampling"].items()) for label, s in sessions(proxy, "completed")}
    assert asked == {("sampled", ("temperature", 0.7), ("top_p", 0.9)), ("greedy", ("temperature", 0.0))}
    assert not await playing.catch_up(await run_of(playing))
    again = worker(Agent(), "me/2")  # restarted, it finds nothing to do
    await again.catch_up(await run_of(again))
    assert again.agent.played == {}


async def test_a_successor_plays_what_is_missing_and_what_was_abandoned(proxy: Any, worker: Any) -> None:
    stuck = asyncio.Event()

    async def hang(data: dict[str, Any]) -> float:
        if data["n"] == 1:
            stuck.set()
            await asyncio.Event().wait()
        return 1.0

    first = worker(Agent(hang), at_once=1)
    task = asyncio.create_task(first.catch_up(await run_of(first)))
    await stuck.wait()
    task.cancel()  # as SIGTERM: it abandons the session
    await asyncio.wait([task])
    assert len(sessions(proxy, "abandoned")) == 1
    before = completed(proxy, 0)
    assert 0 < before.total() < 8
    second = worker(Agent(), "me/2")
    await second.catch_up(await run_of(second))
    assert completed(proxy, 0) == EPISODES
    assert second.agent.played.total() == 8 - before.total()


async def test_an_agent_that_fails_is_given_up_and_one_that_failed_once_is_not(proxy: Any, worker: Any) -> None:
    seen = Counter[int]()

    def act(data: dict[str, Any]) -> float:
        seen[data["n"]] += 1
        if data["n"] == 1 or (data["n"] == 2 and seen[2] == 1):
            raise RuntimeError("boom")
        return 1.0

    playing = worker(Agent(act))
    await playing.catch_up(await run_of(playing))
    failed = Counter(label.episode.index for label, _ in sessions(proxy, "failed"))
    assert failed == {1: 2 * ATTEMPTS, 2: 1}
    assert completed(proxy, 0) == {key: 1 for key in EPISODES if key[1] != 1}
    again = worker(Agent(), "me/2")
    await again.catch_up(await run_of(again))
    assert again.agent.played == {}


async def test_workers_share_an_evaluation(proxy: Any, worker: Any) -> None:
    async def slowly(_: dict[str, Any]) -> float:
        await asyncio.sleep(0.01)
        return 1.0

    workers = [worker(Agent(slowly), f"w{number}/1") for number in range(3)]
    run = await run_of(workers[0])
    await asyncio.gather(*(one.catch_up(run) for one in workers))
    assert completed(proxy, 0) == EPISODES
    assert sum(one.agent.played.total() for one in workers) == 8
    assert all(one.agent.played for one in workers)


async def test_a_worker_without_episodes_left_waits_for_the_others(proxy: Any, worker: Any) -> None:
    stuck, go_on = asyncio.Event(), asyncio.Event()

    async def hang(data: dict[str, Any]) -> float:
        stuck.set()
        await go_on.wait()
        return 1.0

    slow, quick = worker(Agent(hang), "slow/1", at_once=1), worker(Agent(), "quick/1")
    run = await run_of(slow)
    slow_task = asyncio.create_task(slow.catch_up(run))
    await stuck.wait()
    quick_task = asyncio.create_task(quick.catch_up(run))
    while completed(proxy, 0).total() < 7:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not quick_task.done()
    go_on.set()
    await asyncio.gather(slow_task, quick_task)
    assert completed(proxy, 0) == EPISODES


async def test_following_a_run_plays_each_due_step_of_the_surviving_lineage_once(proxy: Any, worker: Any) -> None:
    proxy.steps = 9
    playing = worker(Agent(), every=4)
    following = asyncio.create_task(playing.follow())

    async def until(version: int) -> None:
        while completed(proxy, version) != EPISODES:
            assert not following.done()
            await asyncio.sleep(0.01)

    await until(0)
    proxy.publish(1, 2, 3, 4, 5)  # one that the worker did not see being published
    await until(4)
    proxy.roll_back(2)
    proxy.publish(3, 4, version=6)  # steps 3 and 4 again
    await until(7)
    proxy.publish(5, 6, 7, 8, 9, version=8)
    await until(12)
    await following
    assert {label.version for label, _ in sessions(proxy, "completed")} == {0, 4, 7, 12}
    assert {(label.step, label.version) for label, _ in sessions(proxy, "completed")} >= {(4, 4), (4, 7), (9, 12)}
    assert playing.agent.played.total() == 4 * 8


def test_settings_come_from_the_config(tmp_path: Any) -> None:
    (tmp_path / "t.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    base = {"name": "r", "model": "tiny"}
    tasks = {"tasks": str(tmp_path / "t.jsonl"), "unseen_tasks": str(tmp_path / "t.jsonl"), "size": 1}
    default = settings_of(parse_config(base | {"evaluation": tasks}))
    assert [(s.name, s.sampling.temperature, s.tasks) for s in default] == [
        ("sampled", 1.0, [{"n": 1}]),
        ("greedy", 0.0, [{"n": 1}]),
        ("unseen", 1.0, [{"n": 1}]),
    ]
    own = settings_of(parse_config(base | {"evaluation": tasks | {"settings": {"b": {"top_k": 3}, "a": {}}}}))
    assert [(s.name, s.sampling.model_dump(exclude_none=True)) for s in own] == [
        ("b", {"top_k": 3}),
        ("a", {}),
        ("unseen", {"top_k": 3}),
    ]
    assert settings_of(parse_config(base)) == []
