"""Games against a real proxy: each player is a trajectory with the reward that the library gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from gyms import needs_gyms
from sqlalchemy import select

from agentrl.client import AsyncClient
from agentrl.environments.text_games import TextArena
from agentrl.environments.toy_text import ToyText
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.runner import sessions_of
from agentrl.store.tables import sessions, trajectories
from agentrl.testing import Reply

pytestmark = needs_gyms
GAME: dict[str, Any] = {"game": "TicTacToe-v0-raw", "seed": 1, "players": 2, "settings": {}}


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=60) as made:
        yield made


async def played(proxy: Any, client: AsyncClient, agent: Any, data: Any, *moves: str) -> tuple[Outcome, Any]:
    """One episode of a training group, with these answers of the model; the outcome, and the sub-agents' sessions."""
    proxy.engine.enqueue(*(Reply(proxy.says(move)) for move in moves))
    group = await client.request("POST", "/groups", {})
    first, second = sessions_of(group)
    await client.request("POST", f"/sessions/{second['session_id']}/end", {})
    async with agent_http(60) as http:
        outcome = await play(client, agent, data, first, http=http, timeout_s=120)
    with proxy.database.read() as conn:
        rows = conn.execute(select(sessions).where(sessions.c.parent_session_id == outcome.session_id)).all()
    return outcome, rows


def rewards(proxy: Any, session_id: str) -> list[tuple[float, str]]:
    return [(one["value"], one["source"]) for one in proxy.get(f"/sessions/{session_id}")["rewards"]]


async def test_both_seats_of_a_game_are_trajectories_with_rewards_of_their_own(proxy, client) -> None:
    """Player 0 wins with the upper row."""
    outcome, (other,) = await played(proxy, client, TextArena(), GAME, "[0]", "[3]", "[1]", "[4]", "[2]")
    assert outcome.error is None
    ours = 1 - other.metadata["player"]
    expected = {0: 1.0, 1: -1.0}
    assert rewards(proxy, outcome.session_id) == [(expected[ours], "textarena")]
    assert rewards(proxy, other.id) == [(expected[1 - ours], "textarena")]
    for session_id, player in ((outcome.session_id, ours), (other.id, 1 - ours)):
        calls = proxy.calls({"session_id": session_id})
        assert len(calls) == (3, 2)[player]
        assert calls[0]["new_messages"][0]["content"].startswith(f"You are Player {player} in Tic Tac Toe.")
        assert all(call["parent_id"] == before["id"] for before, call in pairwise(calls))
        with proxy.database.read() as conn:
            built = conn.execute(select(trajectories).where(trajectories.c.session_id == session_id)).all()
        assert len(built) == 1
    assert (other.status, proxy.get(f"/sessions/{outcome.session_id}")["status"]) == ("completed", "completed")


async def test_a_cancelled_game_trains_no_seat(proxy, client) -> None:
    proxy.engine.enqueue(Reply(proxy.says("[0]")), Reply(proxy.says("[3]"), hold_after=1))
    first, _ = sessions_of(await client.request("POST", "/groups", {}))
    async with agent_http(60) as http:
        playing = asyncio.create_task(play(client, TextArena(), GAME, first, http=http, timeout_s=120))
        await proxy.engine.until(lambda: proxy.engine.holding == 1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        proxy.engine.release()
    with proxy.database.read() as conn:
        of_family = (sessions.c.id == first["session_id"]) | (sessions.c.parent_session_id == first["session_id"])
        states = [row.status for row in conn.execute(select(sessions.c.status).where(of_family))]
        trained = conn.execute(select(trajectories.c.state).where(trajectories.c.state == "ready")).all()
    assert len(states) == 2
    assert "completed" not in states
    assert trained == []


async def test_a_game_without_an_end_is_rejected_with_all_its_seats(proxy, client) -> None:
    outcome, (other,) = await played(proxy, client, TextArena(max_moves=2), GAME, "[0]", "[3]")
    assert (outcome.error, outcome.reward) == (None, None)
    with proxy.database.read() as conn:
        rows = conn.execute(select(trajectories).where(trajectories.c.session_id.in_([outcome.session_id, other.id])))
        assert {row.state for row in rows} == {"rejected"}


async def test_one_player_plays_alone(proxy, client) -> None:
    data = {"game": "GuessTheNumber-v0-raw", "seed": 3, "players": 1, "settings": {}}
    outcome, others = await played(proxy, client, TextArena(), data, "no", "no")
    assert (outcome.error, others) == (None, [])
    assert outcome.reward is not None
    assert rewards(proxy, outcome.session_id) == [(outcome.reward, "textarena")]


async def test_an_agent_walks_to_the_end_of_an_episode(proxy, client) -> None:
    data = {"environment": "FrozenLake-v1", "settings": {"is_slippery": False}, "seed": 1}
    moves = ("down", "down", "what?", "right", "right", "down", "right")
    outcome, _ = await played(proxy, client, ToyText(), data, *moves)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    calls = proxy.calls({"session_id": outcome.session_id})
    assert len(calls) == 7
    assert calls[3]["new_messages"][-1]["content"].startswith("There is no action in your answer")


async def test_an_episode_ends_when_the_context_is_full(proxy, client) -> None:
    data = {"environment": "CliffWalking-v1", "settings": {}, "seed": 1}
    outcome, _ = await played(proxy, client, ToyText(), data, *["up"] * 20)
    assert outcome.error is None
    assert outcome.reward == -len(proxy.calls({"session_id": outcome.session_id})) > -20
    proxy.engine.clear()
