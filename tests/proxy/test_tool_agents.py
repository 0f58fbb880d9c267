"""The ready-made agent with tools against a real proxy, and the examples of the page about tools."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.client import AsyncClient
from agentrl.configs.config_files import parse_config
from agentrl.errors import UserError
from agentrl.rollout.agent import load_agent
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.rewards.scored_agent import agent_of
from agentrl.testing import Reply

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


@pytest.fixture
def proxy(shared_proxy: Any) -> Any:
    return shared_proxy


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the page's examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    npx = tmp_path / "npx"  # machines without npm read the page too
    npx.write_text("#!/bin/sh\n")
    npx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for block in blocks("python"):
        name = block.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(block)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made:
        yield made


async def episode(client: AsyncClient, data: dict[str, Any], **config: Any) -> Outcome:
    session = (await client.request("POST", "/groups", {"is_eval": True, "task": data}))["sessions"][0]
    settings = parse_config({"name": "r", "model": "tiny", "tasks": "t.jsonl", **config})
    async with agent_http(20) as http, agent_of(settings) as agent:
        return await play(client, agent, data, session, http=http, timeout_s=60, is_eval=True)


def rewards(proxy: Any, outcome: Outcome) -> dict[str, float]:
    return {one["name"]: one["value"] for one in proxy.get(f"/sessions/{outcome.session_id}")["rewards"]}


def calls(proxy: Any, name: str, **arguments: Any) -> Reply:
    return Reply(proxy.says(f"{name}({json.dumps(arguments)})"))


@pytest.mark.parametrize("agent", [{}, {"agent": "my_agent:Agent", "agent_args": {}, "reward": None}])
async def test_the_first_example_of_the_page_works(proxy: Any, client: AsyncClient, agent: dict[str, Any]) -> None:
    config = yaml.safe_load(blocks("yaml")[0])
    task = {"prompt": "What do 3 books cost?", "answer": "27"}
    assert json.dumps(task) in PAGE
    proxy.engine.enqueue(calls(proxy, "price", item="book", count=3), Reply(proxy.says("27")))
    outcome = await episode(client, task, **config | agent)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    first, second = proxy.calls({"session_id": outcome.session_id})
    assert second["parent_id"] == first["id"]
    assert [one["content"] for one in second["new_messages"] if one["role"] == "tool"] == ["27"]


async def test_the_example_with_state_rewards_itself(proxy: Any, client: AsyncClient) -> None:
    config = yaml.safe_load(blocks("yaml")[1])
    for amount, said, reward in ((150, "50 left", 1.0), (900, "error: there is not enough money", 0.0)):
        proxy.engine.enqueue(calls(proxy, "withdraw", amount=amount), Reply(proxy.says("ok")))
        outcome = await episode(client, {"prompt": "Take 150.", "balance": 200, "wanted": 50}, **config)
        assert (outcome.error, outcome.reward) == (None, reward)
        assert rewards(proxy, outcome) == {"Account": reward}
        assert proxy.calls({"session_id": outcome.session_id})[1]["new_messages"][-1]["content"] == said


async def test_the_example_of_a_tool_of_verl_works(proxy: Any, client: AsyncClient) -> None:
    (config,) = (yaml.safe_load(block) for block in blocks("yaml") if "my_verl_tools.Submit" in block)
    kwargs = {"submit": {"create_kwargs": {"ground_truth": "4"}}}
    for answer, reward in (("4", 1.0), ("5", 0.0)):
        proxy.engine.enqueue(Reply(proxy.says(f"submit({answer})")), Reply(proxy.says("ok")))
        task = {"prompt": "2+2?", "extra_info": {"tools_kwargs": kwargs}}
        outcome = await episode(client, task, **config)
        assert (outcome.error, outcome.reward) == (None, reward)
        assert rewards(proxy, outcome) == {"submit": reward}


async def test_the_example_of_a_user_works(proxy: Any, client: AsyncClient) -> None:
    (config,) = (yaml.safe_load(block) for block in blocks("yaml") if "teacher.Teacher" in block)
    proxy.engine.enqueue(Reply(proxy.says("5")), Reply(proxy.says("4")))
    task = {"prompt": "2+2?", "interaction_kwargs": {"ground_truth": "4"}}
    outcome = await episode(client, task, **config)
    assert (outcome.error, outcome.reward) == (None, 1.0)
    first, second = proxy.calls({"session_id": outcome.session_id})
    assert second["parent_id"] == first["id"]
    assert second["new_messages"][-1]["content"] == "No. Try again."


async def test_an_episode_without_a_reward_fails(proxy: Any, client: AsyncClient) -> None:
    proxy.engine.enqueue(Reply(proxy.says("27")))
    outcome = await episode(client, {"prompt": "?"}, agent="tool_agent", agent_args={"tools": ["shop:price"]})
    assert outcome.error.startswith("UserError: the episode has no reward")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tool": []}, "unexpected keyword argument 'tool'"),
        ({"tools": "shop:price"}, "tools: must be a list"),
        ({"tools": ["shop:prize"]}, r"tools\[0\]: 'shop' has no 'prize'; did you mean 'price'"),
        ({"tools": ["shop:PRICES"]}, r"tools\[0\]: .* is no tool"),
        ({"tools": [{"used": "bank:Account"}]}, r"tools\[0\]: needs the key `use`, `mcp` or"),
        ({"tools": [{"use": "bank:Account", "args": {"limits": 1}}]}, "Account does not take these arguments"),
        ({"tools": [{"use": "shop:price", "args": {"a": 1}}]}, "only a class takes `args`"),
        ({"tools": [], "max_turns": 0}, "max_turns: must be at least 1"),
        ({"tools": [], "tool_timeout_s": 0}, r"agent_args: 'timeout_s': .*greater than 0"),
        ({"tools": [], "truncate": "centre"}, r"agent_args: 'truncate': there is no 'centre'"),
    ],
)
def test_a_wrong_configuration_is_refused_when_it_is_loaded(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_agent("tool_agent", args)


def test_all_configurations_of_the_page_are_valid() -> None:
    for block in blocks("yaml"):
        config = parse_config({"name": "r", "model": "tiny", "tasks": "t.jsonl", **yaml.safe_load(block)})
        load_agent(config.agent, config.agent_args, scored=config.reward is not None)
