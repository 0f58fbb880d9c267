"""Groups are played to the end of the run; an agent that fails or hangs fails alone."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from agentrl.client import AsyncClient
from agentrl.console import Console
from agentrl.rollout.http import AgentHttp, agent_http
from agentrl.rollout.runner import run_groups
from agentrl.rollout.worker_display import Progress, shown


class Scripted:
    """Does what `act` says for its n-th episode."""

    def __init__(self, *acts: Any) -> None:
        self.acts = list(acts)
        self.calls: list[Any] = []

    async def run(self, data: dict[str, Any], **extra: Any) -> float | Mapping[str, float] | None:
        self.calls.append((data, extra))
        act = self.acts.pop(0) if self.acts else 1.0
        if isinstance(act, Exception):
            raise act
        if isinstance(act, asyncio.Event):
            act.set()
            await asyncio.Event().wait()
        result: float | None = act
        return result


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "k", timeout_s=30) as made:
        yield made


@pytest.fixture
async def http() -> AsyncIterator[AgentHttp]:
    async with agent_http(5) as made:
        yield made


async def rollouts(client: AsyncClient, http: AgentHttp, agent: Scripted, timeout_s: float = 30) -> Progress:
    progress = Progress()
    await run_groups(
        client, agent, http=http, timeout_s=timeout_s, max_concurrent_groups=2, owner="me", progress=progress
    )
    return progress


async def test_an_agent_is_told_the_group_of_its_session(proxy: Any, client: AsyncClient, http: AgentHttp) -> None:
    agent = Scripted()
    await rollouts(client, http, agent)
    assert sorted((data["n"], extra["group_id"]) for data, extra in agent.calls) == [
        (0, "g0"),
        (0, "g0"),
        (1, "g1"),
        (1, "g1"),
    ]


async def test_every_group_is_played_until_the_run_is_finished(
    proxy: Any, client: AsyncClient, http: AgentHttp
) -> None:
    agent = Scripted(1.0, {"chatcmpl-1": 0.5}, None, 0)
    progress = await rollouts(client, http, agent)
    assert (progress.groups, progress.sessions) == (2, 4)
    assert {s["status"] for s in proxy.sessions.values()} == {"completed"}
    assert sorted(r["value"] for r in proxy.rewards) == [0.0, 0.5, 1.0]
    assert {r.get("interaction_id") for r in proxy.rewards} == {None, "chatcmpl-1"}
    _, extra = agent.calls[0]
    assert {"base_url", "api_key", "http_client", "is_eval"} <= set(extra)


async def test_the_greedy_episode_is_played_and_is_none_of_the_rewards_that_a_filter_sees(
    proxy: Any, client: AsyncClient, http: AgentHttp
) -> None:
    proxy.with_baseline = True
    agent, judged = Scripted(1.0, 2.0, 50.0, 3.0, 4.0, 60.0), list[list[float]]()

    def accept(task: Any, rewards: Any) -> str:
        judged.append(sorted(rewards))
        return "a test"

    await run_groups(
        client,
        agent,
        http=http,
        timeout_s=30,
        max_concurrent_groups=1,
        owner="me",
        progress=Progress(),
        accept=accept,
    )
    assert [extra.get("is_baseline", False) for _, extra in agent.calls] == [False, False, True] * 2
    assert {extra["group_size"] for _, extra in agent.calls} == {2}
    assert judged == [[1.0, 2.0], [3.0, 4.0]]
    ends = list(proxy.sessions.values())
    assert ["reject_group" in session for session in ends] == [False, True, False] * 2
    assert sorted(reward["value"] for reward in proxy.rewards) == [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]


async def test_progress_counts_what_runs(proxy: Any, client: AsyncClient, http: AgentHttp) -> None:
    begun, progress = [asyncio.Event(), asyncio.Event()], Progress()
    playing = asyncio.create_task(
        run_groups(
            client, Scripted(*begun), http=http, timeout_s=60, max_concurrent_groups=1, owner="me", progress=progress
        )
    )
    for event in begun:
        await event.wait()
    assert progress.line().startswith("rollouts: 2 sessions running · 0 ended")
    playing.cancel()
    await asyncio.wait([playing])
    assert progress.line().startswith("rollouts: 0 sessions running · 0 ended")


async def test_a_session_counts_as_ended_before_its_group_does(
    proxy: Any, client: AsyncClient, http: AgentHttp
) -> None:
    begun, progress = asyncio.Event(), Progress()
    playing = asyncio.create_task(
        run_groups(
            client,
            Scripted(1.0, begun),
            http=http,
            timeout_s=60,
            max_concurrent_groups=1,
            owner="me",
            progress=progress,
        )
    )
    await begun.wait()
    while progress.sessions == 0:  # noqa: ASYNC110 - it has ended when the proxy has answered
        await asyncio.sleep(0.001)
    assert "1 sessions running · 1 ended" in progress.line()
    assert "whole groups" not in progress.line()
    playing.cancel()
    await asyncio.wait([playing])


async def test_a_failing_agent_fails_only_its_own_session(proxy: Any, client: AsyncClient, http: AgentHttp) -> None:
    progress = await rollouts(client, http, Scripted(RuntimeError("boom"), float("nan")))
    assert progress.errors.total() == 2
    errors = sorted(s["error"] for s in proxy.sessions.values() if s["status"] == "failed")
    assert errors == ["RuntimeError: boom", "UserError: an agent returned the reward nan"]
    assert len(proxy.rewards) == 2
    assert "2 failed" in progress.line()


async def test_a_hanging_agent_times_out(proxy: Any, client: AsyncClient, http: AgentHttp) -> None:
    await rollouts(client, http, Scripted(asyncio.Event()), timeout_s=0.05)
    assert [s["error"] for s in proxy.sessions.values() if s["status"] == "failed"] == [
        "the agent ran longer than 0.05 s"
    ]


async def test_without_a_terminal_progress_is_plain_lines() -> None:
    out = io.StringIO()
    progress = Progress()
    progress.waits(0.5, "no capacity")
    async with shown(progress, Console(file=out)):
        pass
    assert out.getvalue().startswith("rollouts: 0 sessions running · 0 ended")
    assert "waiting: no capacity" in out.getvalue()
    assert "\x1b" not in out.getvalue()
