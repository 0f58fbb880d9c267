"""One episode: what fails its session, and how the session ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from starlette.responses import JSONResponse

from agentrl.client import AsyncClient
from agentrl.errors import AgentRLError
from agentrl.rollout.agent import Agent
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import AgentHttp, agent_http


class Acts:
    """An agent that does what a function says."""

    def __init__(self, act: Callable[[], Awaitable[Any]]) -> None:
        self._act = act

    async def run(self, data: dict[str, Any], **extra: Any) -> Any:
        return await self._act()


def returns(value: Any) -> Acts:
    async def act() -> Any:
        return value

    return Acts(act)


def raises(error: Exception) -> Acts:
    async def act() -> Any:
        raise error

    return Acts(act)


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "k", timeout_s=30) as made:
        yield made


@pytest.fixture
async def http() -> AsyncIterator[AgentHttp]:
    async with agent_http(5) as made:
        yield made


@pytest.fixture
async def session(proxy: Any, client: AsyncClient) -> Any:
    return await client.request("POST", "/sessions", {})


@pytest.fixture
def played(client: AsyncClient, http: AgentHttp, session: Any) -> Callable[..., Awaitable[Outcome]]:
    """Plays the session with an agent."""

    async def act(agent: Any, timeout_s: float = 60) -> Outcome:
        return await play(client, agent, {}, session, http=http, timeout_s=timeout_s)

    return act


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (JSONResponse({"error": {"message": "no such call", "code": "c"}}, 404), "RequestError: no such call"),
        (JSONResponse({"error": {"message": "away", "code": "c"}}, 503, {"retry-after": "60"}), "RequestError: away"),
    ],
)
async def test_a_reward_that_is_not_taken_fails_its_session(
    proxy: Any, session: Any, played: Any, refused: JSONResponse, error: str
) -> None:
    proxy.faults["/sessions/{sid}/reward"] = [refused]
    outcome = await played(returns({"wrong id": 1.0}))
    assert (outcome.reward, outcome.error) == (None, error)
    ended = proxy.sessions[session["session_id"]]
    assert (ended["status"], ended["error"]) == ("failed", error)


async def test_a_refused_end_is_the_error_of_the_episode(proxy: Any, played: Any) -> None:
    proxy.faults["/sessions/{sid}/end"] = [JSONResponse({"error": {"message": "no", "code": "c"}}, 404)]
    outcome = await played(returns(1.0))
    assert (outcome.reward, outcome.error) == (None, "RequestError: no")


async def test_an_agents_own_timeout_is_an_error_of_the_agent(played: Any) -> None:
    assert (await played(raises(TimeoutError("its tool")))).error == "TimeoutError: its tool"


@pytest.mark.parametrize("raised", [ValueError("cleaning up failed"), TimeoutError("its tool")])
async def test_an_agent_that_raises_when_its_time_is_over_ran_too_long(
    proxy: Any, session: Any, played: Any, raised: Exception
) -> None:
    async def act() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise raised from None

    assert (await played(Acts(act), timeout_s=0.05)).error == "the agent ran longer than 0.05 s"
    assert proxy.sessions[session["session_id"]]["status"] == "failed"


async def test_an_episode_that_gets_no_place_fails(proxy: Any, session: Any, played: Any) -> None:
    class Full:
        def place(self, group_id: str) -> AbstractAsyncContextManager[Agent]:
            raise AgentRLError("loading the agent took longer than 300 s")

    assert (await played(Full())).error == "AgentRLError: loading the agent took longer than 300 s"
    assert proxy.sessions[session["session_id"]]["status"] == "failed"


async def test_the_time_for_a_place_is_not_the_agents(played: Any) -> None:
    class Slow:
        @asynccontextmanager
        async def place(self, group_id: str) -> AsyncIterator[Agent]:
            await asyncio.sleep(0.2)
            yield returns(1.0)

    assert (await played(Slow(), timeout_s=0.1)).error is None


async def test_cancelling_abandons_the_session(proxy: Any, session: Any, played: Any) -> None:
    entered = asyncio.Event()

    async def act() -> None:
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(played(Acts(act)))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert proxy.sessions[session["session_id"]]["status"] == "abandoned"
