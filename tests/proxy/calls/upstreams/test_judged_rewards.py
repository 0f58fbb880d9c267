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


def says_in_turn(*texts):
    """Each call gets the next text."""
    left = list(texts)

    async def answer(judge, request):
        return await says(left.pop(0))(judge, request)

    return answer


async def episode(proxy, **args):
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as client:
        task = {"prompt": "abcd", "answer": "dcba"}
        session = (await client.request("POST", "/groups", {"is_eval": True, "task": task}))["sessions"][0]
        proxy.engine.enqueue(Reply(proxy.says("dcba")))
        async with agent_http(20) as http, agent_of(config(**args)) as agent:
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


@pytest.mark.parametrize(("aggregate", "reward"), [("mean", (0.4 + 0.4 + 1) / 3), ("median", 0.4), ("majority", 0.4)])
async def test_a_judge_votes_several_times(proxy, judge, aggregate, reward):
    judge.answer = says_in_turn("Score: 4", "Score: 10", "Score: 4")
    outcome = await episode(proxy, votes=3, aggregate=aggregate)
    assert (outcome.error, outcome.reward) == (None, pytest.approx(reward))
    assert len(upstream_calls(proxy, {"session_id": outcome.session_id})) == len(judge.got) == 3
    stats = proxy.get(f"/sessions/{outcome.session_id}")["stats"]
    assert stats == {
        "reward/reward/agreement": pytest.approx(1 / 3),
        "reward/reward/std": pytest.approx(0.08**0.5),
    }


async def test_most_votes_are_enough(proxy, judge):
    judge.answer = says_in_turn("no idea", "Score: 4", "Score: 4")
    outcome = await episode(proxy, votes=3)
    assert (outcome.error, outcome.reward, len(judge.got)) == (None, 0.4, 3)


async def test_too_few_votes_are_asked_for_again(proxy, judge):
    judge.answer = says_in_turn("no idea", "none", "Score: 4", *["Score: 6"] * 3)
    outcome = await episode(proxy, votes=3)
    assert (outcome.error, outcome.reward, len(judge.got)) == (None, 0.6, 6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"votes": 0}, "votes must be a whole number from 1 to 32, got 0"),
        ({"votes": 33}, "votes must be"),
        ({"votes": 2.5}, "votes must be"),
        ({"votes": 3, "aggregate": "medain"}, "no 'medain'; did you mean 'median'"),
        ({"votes": 3, "temperature": 0}, "at temperature 0 are the same vote"),
    ],
)
def test_votes_that_make_no_sense_are_refused(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        check_agent(config(**args))


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
