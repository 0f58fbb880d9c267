"""A user that an upstream plays, through the proxy: recorded, and not trained."""

from pathlib import Path

import pytest

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.errors import UserError
from agentrl.rollout.episode import play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards.scored_agent import agent_of, check_agent
from agentrl.testing import Reply

from .judge_server import upstream_calls, whole


def config(model="judge"):
    upstreams = {"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "gpt-x"}}
    base = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "proxy": {"upstreams": upstreams}, "reward": "exact"}
    return parse_config(base | {"agent": "tool_agent", "agent_args": {"user": {"model": model}, "max_turns": 2}})


def says(text):
    return whole({"id": "j", "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}]})


async def test_the_users_calls_are_recorded_and_not_trained(proxy, judge):
    judge.answer = says("I want dcba.")
    task = {"instruction": "Ask for dcba.", "answer": "dcba"}
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as client:
        session = (await client.request("POST", "/groups", {"is_eval": True, "task": task}))["sessions"][0]
        proxy.engine.enqueue(Reply(proxy.says("abcd")), Reply(proxy.says("dcba")))
        async with agent_http(20) as http, agent_of(config()) as agent:
            outcome = await play(client, agent, task, session, http=http, timeout_s=60, is_eval=True)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    found = {"session_id": outcome.session_id}
    assert len(judge.got) == len(upstream_calls(proxy, found)) == 3
    assert "Ask for dcba." in judge.got[0][2]["messages"][0]["content"]
    own = [call for call in proxy.calls(found) if call["role"] == "main"]
    assert [call["new_messages"][-1]["content"] for call in own] == ["I want dcba."] * 2
    assert own[1]["parent_id"] == own[0]["id"]


def test_a_user_that_is_no_upstream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"agent_args\.user\.model: there is no upstream 'jugde'.*; did you mean 'judge'"
    ):
        check_agent(config("jugde"))
    check_agent(config())
