"""Agents whose environment is a program with a Python of its own: its tasks, rewards, errors, and its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.environments import foreign
from agentrl.environments.foreign import EnvironmentFailed, ForeignAgent, OneByOne, tasks_of
from agentrl.errors import UserError

PROGRAM = """
import asyncio, os
from host_loop import main

class Environment:
    def __init__(self, settings):
        if settings.get("broken"):
            raise ValueError("no such taskset")
        self.settings = settings
    def tasks(self):
        print("what libraries print")
        for n in range(self.settings["count"]):
            if n == self.settings.get("fails_at"):
                raise ValueError("a damaged row")
            yield {"n": n}
    async def play(self, request):
        do = request["task"].get("do")
        if do == "fail":
            raise RuntimeError(f"refused {request['api_key']}")
        if do == "die":
            os._exit(3)
        if do == "wait":
            open(request["task"]["started"], "w").close()
            try:
                await asyncio.Event().wait()
            finally:
                open(request["task"]["ended"], "w").close()
        return {"right": 1.0, "form": 0.25} if do != "odd" else {"right": "much"}
    async def __aenter__(self):
        return self
    async def __aexit__(self, *error):
        pass

if __name__ == "__main__":
    main(Environment)
"""


class Scripted(ForeignAgent):
    program = "scripted_program.py"


class ScriptedPool(OneByOne):
    kind = Scripted


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A room of programs with one more."""
    (tmp_path / "host_loop.py").write_text((foreign.PROGRAMS / "host_loop.py").read_text())
    (tmp_path / Scripted.program).write_text(PROGRAM)
    monkeypatch.setattr(foreign, "PROGRAMS", tmp_path)


@pytest.fixture
async def agent() -> AsyncIterator[Scripted]:
    made = Scripted(python=sys.executable, count=3)
    yield made
    await made.aclose()


async def run(agent: Scripted | OneByOne, **data: Any) -> Any:
    return await agent.run(data, base_url="http://h/sessions/s/v1", api_key="secret", http_client=None)


async def until_exists(path: Path) -> None:
    async with asyncio.timeout(60):
        while not path.exists():  # noqa: ASYNC110, ASYNC240 - another process writes it
            await asyncio.sleep(0.01)


async def test_episodes_share_a_program_and_have_its_rewards(agent: Scripted) -> None:
    results = await asyncio.gather(*(run(agent, n=n) for n in range(5)))
    assert {(one.name, one.value, one.source) for result in results for one in result.rewards} == {
        ("right", 1.0, "scripted"),
        ("form", 0.25, "scripted"),
    }


async def test_an_episode_fails_alone_with_the_error_and_without_its_key(agent: Scripted) -> None:
    fine: Any
    failed: Any
    fine, failed = await asyncio.gather(run(agent, n=1), run(agent, do="fail"), return_exceptions=True)
    assert len(fine.rewards) == 2
    assert isinstance(failed, EnvironmentFailed)
    assert str(failed) == "RuntimeError: refused [session key]"


async def test_a_reward_that_is_no_number_fails_the_episode(agent: Scripted) -> None:
    with pytest.raises(UserError, match="must return a number"):
        await run(agent, do="odd")


async def test_a_program_that_dies_fails_its_episodes_and_is_replaced(agent: Scripted, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    waiting = asyncio.create_task(run(agent, do="wait", started=str(started), ended=str(ended)))
    await until_exists(started)
    for episode in (run(agent, do="die"), waiting):
        with pytest.raises(EnvironmentFailed, match=r"scripted_program.py: its process died \(exit status 3\)"):
            await episode
    assert len((await run(agent)).rewards) == 2


async def test_a_cancelled_episode_ends_in_the_program(agent: Scripted, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    episode = asyncio.create_task(run(agent, do="wait", started=str(started), ended=str(ended)))
    await until_exists(started)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert ended.exists()
    assert len((await run(agent)).rewards) == 2


async def test_an_environment_that_cannot_be_opened_is_an_error_with_its_reason() -> None:
    agent = Scripted(python=sys.executable, broken=True)
    with pytest.raises(UserError, match="ValueError: no such taskset"):
        await run(agent)


async def test_a_library_that_runs_one_episode_at_a_time_has_several_programs(tmp_path: Path) -> None:
    agent = ScriptedPool(python=sys.executable, processes=2)
    started, ended = tmp_path / "started", tmp_path / "ended"
    waiting = asyncio.create_task(run(agent, do="wait", started=str(started), ended=str(ended)))
    await until_exists(started)
    assert len((await run(agent)).rewards) == 2
    third = asyncio.create_task(run(agent, do="wait", started=str(tmp_path / "again"), ended=str(tmp_path / "other")))
    await until_exists(tmp_path / "again")
    fourth = asyncio.create_task(run(agent))
    for episode in (waiting, third):
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
    assert len((await fourth).rewards) == 2
    await agent.aclose()
    with pytest.raises(UserError, match="processes: must be at least 1, got 0"):
        ScriptedPool(python=sys.executable, processes=0)


def test_tasks_are_read_without_what_the_library_prints() -> None:
    assert list(tasks_of(Scripted.program, sys.executable, {"count": 3})) == [{"n": 0}, {"n": 1}, {"n": 2}]
    found = tasks_of(Scripted.program, sys.executable, {"count": 3, "fails_at": 2})
    assert [next(found), next(found)] == [{"n": 0}, {"n": 1}]
    with pytest.raises(UserError, match=r"(?s)scripted_program.py ended with exit status 1: .*a damaged row"):
        next(found)


def test_an_absent_interpreter_is_named() -> None:
    with pytest.raises(UserError, match=r"agent_args.python: cannot run '/no/python'; in a checkout, make setup-env"):
        Scripted(python="/no/python")
    with pytest.raises(UserError, match=r"tasks.args.python: cannot run '/no/python'"):
        next(tasks_of(Scripted.program, "/no/python", {}))
