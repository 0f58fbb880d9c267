"""Reward functions that hang, spin, leak, crash and lie, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.errors import UserError
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.reward_pool import RewardPool
from agentrl.rollout.rewards.reward_process import CallFailed

FUNCTIONS = """
import asyncio, ctypes, os, subprocess, sys, time

def right(completion, answer):
    return completion == answer

def pid(completion):
    return os.getpid()

def odd(completion):
    if completion == "hang":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "exit":
        os._exit(7)
    if completion == "raise":
        raise KeyError("no such key")
    if completion == "nan":
        return float("nan")
    if completion == "huge":
        bytearray(2**40)
    if completion == "child":
        subprocess.Popen(["sleep", "1000"])
        time.sleep(1000)
    if completion == "print":
        print("x" * 100_000)
    return 1.0

def looped(completion):
    return asyncio.run(slow("0")) == os.getpid()

kept = []

def leaky(completion):
    kept.append(bytearray(200 * 2**20))
    return os.getpid()

async def slow(completion):
    await asyncio.sleep(float(completion))
    return os.getpid()
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "little_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def pool(name: str, **settings: Any) -> RewardPool:
    return RewardPool(RewardConfig(function=f"little_rewards:{name}", **settings))


def an_answer(text: str, **task: Any) -> dict[str, Any]:
    return answer_of(task, [{"role": "user", "content": "?"}], text)


async def values(pool: RewardPool, text: str, timeout_s: float = 20.0, **task: Any) -> Any:
    return (await pool.call("reward", [an_answer(text, **task)], timeout_s))["values"][0]


async def test_a_function_scores_an_answer() -> None:
    async with pool("right", processes=1) as rewards:
        assert await values(rewards, "42", answer="42") == 1.0
        assert await values(rewards, "41", answer="42") == 0.0
        with pytest.raises(CallFailed, match="'answer'") as failed:
            await values(rewards, "41")
    assert failed.value.final


async def test_a_plain_function_may_run_an_event_loop_of_its_own() -> None:
    async with pool("looped", processes=1) as rewards:
        assert await values(rewards, "x") == 1.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("segfault", "signal 11"),
        pytest.param("exit", "exit status 7", marks=pytest.mark.long),
        ("raise", "KeyError: 'no such key'"),
        pytest.param("nan", "returned nan", marks=pytest.mark.long),
        pytest.param("huge", "MemoryError", marks=pytest.mark.long),
    ],
)
async def test_a_failed_call_says_why_and_the_next_one_succeeds(kind: str, message: str) -> None:
    async with pool("odd", processes=1) as rewards:
        with pytest.raises(CallFailed, match=message) as failed:
            await values(rewards, kind)
        assert not failed.value.final
        assert await values(rewards, "print") == 1.0


def running_below() -> set[psutil.Process]:
    """The processes that this one started, and that they started."""
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


async def test_a_hung_call_is_ended_alone_with_everything_that_it_started() -> None:
    before = running_below()  # engines that the test session shares, for example
    async with pool("odd", processes=2) as rewards:
        assert await values(rewards, "well") == 1.0
        hung = [asyncio.create_task(values(rewards, kind, 0.3)) for kind in ("child", "spin")]
        for call in hung:
            with pytest.raises(CallFailed, match=r"ran longer than 0\.3 s"):
                await call
        assert await values(rewards, "well") == 1.0
    assert running_below() <= before


async def test_the_loop_goes_on_while_a_function_spins() -> None:
    async with pool("odd", processes=1) as rewards:
        await rewards.facts()
        spinning = asyncio.create_task(values(rewards, "spin", 0.5))
        turns = 0
        while not spinning.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 10
        with pytest.raises(CallFailed):
            await spinning


@pytest.mark.long
async def test_a_process_that_leaks_is_replaced() -> None:
    async with pool("leaky", processes=1, memory_mb=300) as rewards:
        pids = [await values(rewards, "x") for _ in range(3)]
    assert len(set(pids)) > 1


async def test_a_process_is_replaced_after_its_calls() -> None:
    async with pool("pid", processes=1, recycle_after=2) as rewards:
        pids = [await values(rewards, "x") for _ in range(4)]
    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_async_functions_share_a_process_and_one_that_is_late_disturbs_none() -> None:
    async with pool("slow", processes=1) as rewards:
        late = asyncio.create_task(values(rewards, "100", 0.2))
        pids = await asyncio.gather(*(values(rewards, "0.3") for _ in range(20)))
        with pytest.raises(CallFailed, match="ran longer"):
            await late
        assert pids == [await values(rewards, "0")] * 20


async def test_a_cancelled_call_frees_its_process() -> None:
    async with pool("odd", processes=1) as rewards:
        await rewards.facts()
        hung = asyncio.create_task(values(rewards, "hang", 100.0))
        await asyncio.sleep(0.05)
        hung.cancel()
        assert await values(rewards, "well") == 1.0
        assert hung.cancelled()


async def test_a_process_that_dies_while_idle_is_replaced() -> None:
    async with pool("pid", processes=1) as rewards:
        first = int(await values(rewards, "x"))
        (process,) = rewards._processes
        os.kill(first, signal.SIGKILL)
        assert process._reading is not None
        await asyncio.wait([process._reading])
        assert int(await values(rewards, "x")) != first


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("little_rewards:rigth", "reward.function: 'little_rewards' has no 'rigth'; did you mean 'right'"),
        ("nowhere:score", "cannot import 'nowhere'"),
        ("nothing", "neither module:function nor a verifier"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_named(function: str, message: str) -> None:
    async with RewardPool(RewardConfig(function=function)) as rewards:
        with pytest.raises(UserError, match=message):
            await rewards.facts()


OWNER = """
import asyncio
from agentrl.configs.episodes.reward_config import RewardConfig
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.reward_pool import RewardPool

async def main():
    async with RewardPool(RewardConfig(function="little_rewards:odd", processes=2)) as pool:
        await pool.facts()
        calls = [pool.call("reward", [answer_of({}, [], kind)], 1000.0) for kind in ("child", "spin")]
        await asyncio.gather(*calls)

asyncio.run(main())
"""


def test_nothing_is_left_when_the_worker_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER])
    try:
        started = psutil.Process(owner.pid)
        deadline = time.monotonic() + 30
        found: list[psutil.Process] = []
        while "sleep" not in {process.name() for process in found}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            found = started.children(recursive=True)
    finally:
        owner.kill()
        owner.wait()
    _, alive = psutil.wait_procs(found, timeout=10)
    assert not alive
