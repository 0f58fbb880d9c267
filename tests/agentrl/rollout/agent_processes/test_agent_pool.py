"""Agents in processes of their own: results, and agents that block, crash, leak, hang and ignore cancellation."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.configs.config_files import parse_config
from agentrl.errors import UserError
from agentrl.processes.template import Template
from agentrl.rollout.agent_processes import agent_process
from agentrl.rollout.agent_processes.agent_pool import AgentPool
from agentrl.rollout.agent_processes.agent_process import HOST
from agentrl.rollout.episode import AgentFailed
from agentrl.rollout.score import Result, Reward

AGENT = """
import asyncio, os, signal, time
from agentrl import Result, Reward

kept = []

def score(completion):
    return float(len(completion))

class Agent:
    def __init__(self, loud=False):
        print("loaded")  # must not reach the worker's stdout

    async def run(self, data, **extra):
        kind = data["kind"]
        if kind == "pid":
            await asyncio.sleep(data.get("for_s", 0))
            return os.getpid()
        if kind == "extra":
            return Result(
                rewards=(Reward(value=float(extra["is_eval"]), interaction_id=extra["group_id"], name="n"),),
                trained_tokens={extra["api_key"]: [(0, 2)]},
                answer=7,
                truncated=True,
            )
        if kind == "raise":
            raise ValueError("no luck")
        if kind == "wrong":
            return "well done"
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if kind == "block":
            open(data["file"], "w").close()
            while os.path.exists(data["file"]):
                time.sleep(0.01)
            return 2.0
        if kind == "spin":
            open(data["file"], "w").close()
            while os.path.exists(data["file"]):
                pass
            return 3.0
        if kind == "stubborn":
            open(data["file"], "w").close()
            while True:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    pass
        if kind == "score":
            return await extra["score"]([{"role": "user", "content": "Say."}], "four", alone=True)
        if kind == "leak":
            kept.append(bytearray(120 * 2**20))
            return os.getpid()
"""
EXTRA = {"base_url": "http://127.0.0.1:1/sessions/s/v1", "api_key": "key", "is_eval": True, "group_id": "g"}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_agents.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)


def pool_of(processes: int = 2, **rollout: Any) -> AgentPool:
    config = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "agent": "some_agents:Agent"}
    return AgentPool(parse_config(config | {"rollout": {"processes": processes, **rollout}}))


@pytest.fixture
async def pool() -> AsyncIterator[AgentPool]:
    async with pool_of() as made:
        yield made


async def run(pool: AgentPool, kind: str, group: str = "g", **data: Any) -> Result:
    async with pool.place(group) as agent:
        return await agent.run({"kind": kind, **data}, **EXTRA)


async def pid(pool: AgentPool, group: str = "g", **data: Any) -> int:
    return int((await run(pool, "pid", group, **data)).rewards[0].value)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it is about another process
            await asyncio.sleep(0.01)


def stalled(pool: AgentPool) -> bool:
    return any(process.stalled for process in pool._processes)


async def test_results_arrive_whole_and_episodes_spread_over_processes(pool: AgentPool) -> None:
    assert await run(pool, "extra") == Result(
        rewards=(Reward(value=1.0, interaction_id="g", name="n"),),
        trained_tokens={"key": [(0, 2)]},
        answer="7",
        truncated=True,
    )
    pids = await asyncio.gather(*(pid(pool, for_s=0.3) for _ in range(6)))
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize(
    ("kind", "error"),
    [("raise", "ValueError: no luck"), pytest.param("wrong", "an agent must return a number", marks=pytest.mark.long)],
)
async def test_an_agent_that_fails_is_told_by_its_own_error(pool: AgentPool, kind: str, error: str) -> None:
    with pytest.raises(AgentFailed, match=error):
        await run(pool, kind)


async def test_a_crash_fails_the_episodes_of_its_process_alone_and_is_replaced() -> None:
    async with pool_of(1) as pool:
        waiting = asyncio.create_task(pid(pool, for_s=60))
        before = await pid(pool)
        with pytest.raises(AgentFailed, match=r"its process died \(signal 11\)"):
            await run(pool, "crash")
        with pytest.raises(AgentFailed, match="signal 11"):
            await waiting
        assert await pid(pool) != before


async def test_processes_that_die_while_idle_are_replaced() -> None:
    async with pool_of(1) as pool:
        for _ in range(4):  # more often than there may be processes
            idle = await pid(pool)
            os.kill(idle, signal.SIGKILL)
            await until(lambda: all(process.retiring for process in pool._processes))
        assert len(pool._processes) == 1


async def test_a_blocked_process_gets_no_new_episodes(
    pool: AgentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "STALLED_S", 0.3)
    file = tmp_path / "blocked"
    blocked = asyncio.create_task(run(pool, "block", file=str(file)))
    await until(lambda: file.exists() and stalled(pool))
    assert len({await pid(pool) for _ in range(4)}) == 1  # the other process
    file.unlink()
    assert (await blocked).rewards[0].value == 2.0


async def test_episodes_go_to_the_processes_that_answer(
    pool: AgentPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "LATE_S", 0.3)
    file = tmp_path / "blocked"
    busy = [asyncio.create_task(pid(pool, for_s=60)) for _ in range(2)]
    blocked = asyncio.create_task(run(pool, "block", file=str(file)))
    await until(lambda: file.exists() and any(process.late for process in pool._processes))
    other = next(process for process in pool._processes if not process.late)
    more = [asyncio.create_task(pid(pool, for_s=60)) for _ in range(3)]
    await until(lambda: other.running == 4)
    file.unlink()
    assert (await blocked).rewards[0].value == 2.0
    for task in (*busy, *more):
        task.cancel()
    await asyncio.wait([*busy, *more])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="Linux has such a priority")
async def test_a_process_that_computes_without_end_runs_only_when_a_processor_is_free(tmp_path: Path) -> None:
    async with pool_of(1) as pool:
        process, file = await pid(pool), tmp_path / "spins"
        assert os.sched_getscheduler(process) == os.SCHED_OTHER
        spinning = asyncio.create_task(run(pool, "spin", file=str(file)))
        await until(lambda: os.sched_getscheduler(process) == os.SCHED_IDLE)
        file.unlink()
        assert (await spinning).rewards[0].value == 3.0
        (only,) = pool._processes
        await until(lambda: only.retiring or os.sched_getscheduler(process) == os.SCHED_OTHER)


async def test_when_every_process_is_blocked_others_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "STALLED_S", 0.3)
    async with pool_of(1) as pool:
        file = tmp_path / "blocked"
        blocked = asyncio.create_task(run(pool, "block", file=str(file)))
        await until(lambda: file.exists() and stalled(pool))
        assert await pid(pool) > 0
        assert len(pool._processes) == 2
        file.unlink()
        await blocked


@pytest.mark.parametrize("kind", ["block", pytest.param("stubborn", marks=pytest.mark.long)])
async def test_an_episode_that_ignores_its_end_is_killed_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(agent_process, "CANCEL_S", 0.2)
    async with pool_of(1) as pool:
        file = tmp_path / "busy"
        other = asyncio.create_task(pid(pool, for_s=60))
        process = await pid(pool)
        late = asyncio.create_task(run(pool, kind, file=str(file)))
        await until(file.exists)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        with pytest.raises(AgentFailed, match="another episode blocked its process"):
            await other
        assert not psutil.pid_exists(process)


async def test_a_cancelled_episode_ends_and_its_process_goes_on(pool: AgentPool) -> None:
    process = await pid(pool)
    long = asyncio.create_task(pid(pool, for_s=60))
    await asyncio.sleep(0.05)
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert process in {await pid(pool, for_s=0.1) for _ in range(3)}


async def test_a_process_that_leaks_is_replaced_when_its_episodes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_process, "PING_S", 0.05)
    async with pool_of(1, process_memory_mb=200) as pool:
        leaking = int((await run(pool, "leak")).rewards[0].value)
        await run(pool, "leak")
        async with asyncio.timeout(60):
            while await pid(pool) == leaking:  # noqa: ASYNC110 - it is about another process
                await asyncio.sleep(0.1)


async def test_the_sessions_of_a_group_share_a_process_if_they_are_scored_together() -> None:
    pool = pool_of()
    pool._scored = True
    async with pool:
        pids = await asyncio.gather(*(pid(pool, group, for_s=0.3) for group in "aabb"))
        assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_agents_score_with_the_runs_reward_functions() -> None:
    config: dict[str, Any] = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "agent": "some_agents:Agent"}
    config |= {"reward": {"function": "some_agents:score"}, "rollout": {"processes": 1}}
    async with AgentPool(parse_config(config)) as scored:
        found = await run(scored, "score")
    assert [reward.value for reward in found.rewards] == [4.0]


async def test_an_agent_that_cannot_be_loaded_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "some_agents.py").write_text("")
    async with pool_of() as pool:
        with pytest.raises(UserError, match="has no 'Agent'"):
            await pid(pool)


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async with pool_of() as pool:
        pids = {await pid(pool, for_s=0.1) for _ in range(2)}
    assert not any(psutil.pid_exists(one) for one in pids)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")
async def test_a_process_that_has_used_an_sdk_once_can_be_forked(tmp_path: Path) -> None:
    """A call that left a thread would make each process import everything by itself."""
    (tmp_path / "some_agents.py").write_text(
        "from openai import AsyncOpenAI\nfrom agentrl import ToolLoop, tool\n" + AGENT
    )
    config = pool_of()._json
    template = await Template.start(HOST, {"config": config})
    assert template is not None
    await template.stop()
