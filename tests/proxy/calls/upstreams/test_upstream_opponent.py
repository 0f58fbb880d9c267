"""A game of TextArena against an upstream: only the policy's seat is trained."""

from gyms import needs_gyms
from sqlalchemy import select

from agentrl.client import AsyncClient
from agentrl.environments.text_games import TextArena
from agentrl.rollout.episode import play
from agentrl.rollout.http import agent_http
from agentrl.rollout.runner import sessions_of
from agentrl.store.tables import sessions
from agentrl.testing import Reply

from .judge_server import upstream_calls, whole

pytestmark = needs_gyms


async def test_an_upstream_plays_the_other_seat(proxy, judge):
    """It always takes the last square, so its second move is invalid, and so is its third."""
    message = {"role": "assistant", "content": "[8]"}
    judge.answer = whole({"id": "j", "choices": [{"finish_reason": "stop", "message": message}]})
    task = {"game": "TicTacToe-v0-raw", "seed": 1, "players": 2, "settings": {}}
    async with AsyncClient(proxy.url, "run-key", timeout_s=60) as client, agent_http(60) as http:
        first, _ = sessions_of(await client.request("POST", "/groups", {}))
        proxy.engine.enqueue(Reply(proxy.says("[0]")), Reply(proxy.says("[1]")))
        outcome = await play(client, TextArena(opponent="judge"), task, first, http=http, timeout_s=120)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    assert len(upstream_calls(proxy, {"session_id": outcome.session_id})) == 3
    with proxy.database.read() as conn:
        below = select(sessions.c.id).where(sessions.c.parent_session_id == outcome.session_id)
        assert conn.execute(below).all() == []
    proxy.engine.clear()
