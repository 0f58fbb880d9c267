"""Rewards from a judge model, through the proxy."""

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


def config(**args):
    reward = {"function": "judge", "args": {"model": "judge", **args}, "retries": 1, "processes": 1}
    upstreams = {"judge": {"base_url": "http://127.0.0.1:1/v1", "model": "gpt-x"}}
    base = {"name": "r", "model": "tiny", "tasks": "t.jsonl", "proxy": {"upstreams": upstreams}}
    return parse_config(base | {"reward": reward})


def says(text):
    return whole({"id": "j", "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}]})


async def episode(proxy):
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as client:
        task = {"prompt": "abcd", "answer": "dcba"}
        session = (await client.request("POST", "/groups", {"is_eval": True, "task": task}))["sessions"][0]
        proxy.engine.enqueue(Reply(proxy.says("dcba")))
        async with agent_http(20) as http, agent_of(config()) as agent:
            return await play(client, agent, task, session, http=http, timeout_s=60, is_eval=True)


async def test_a_judge_scores_the_answer(proxy, judge):
    judge.answer = says("Nearly right: 3 of 4.\nScore: 7.5")
    outcome = await episode(proxy)
    assert (outcome.error, outcome.reward) == (None, 0.75)
    ((_, _, body),) = judge.got
    (asked,) = body["messages"]
    assert "<question>\nabcd\n</question>" in asked["content"]
    assert "<reference>\ndcba\n</reference>" in asked["content"]
    assert "<answer>\ndcba\n</answer>" in asked["content"]
    assert len(upstream_calls(proxy, {"session_id": outcome.session_id})) == 1


async def test_a_judge_without_a_score_fails_the_session(proxy, judge):
    judge.answer = says("Score: 70")
    outcome = await episode(proxy)
    assert "gave no score from 0 to 10" in outcome.error
    assert outcome.error.endswith("(attempt 2)")
    assert len(judge.got) == 2


def test_a_judge_that_is_no_upstream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no upstream 'jugde' in proxy\.upstreams; did you mean 'judge'"):
        check_agent(config(model="jugde"))
    check_agent(config())
