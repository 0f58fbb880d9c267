"""The SQL agent of the gallery, written with LangGraph and with the OpenAI Agents SDK."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from scripted_model import Model, served

from agentrl.agents.sql.shop_database import heldout_tasks
from agentrl.domain.schemas import Json
from agentrl.rollout.command import CommandAgent

pytestmark = pytest.mark.long
PROGRAMS = ["sql_langgraph", "sql_agents_sdk"]
ROOT = Path(__file__).parents[2]


async def reward_of(python: Path, program: str, task: Json, model: Model, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(ROOT)  # for `agentrl`
    with served(model) as url:
        agent = CommandAgent([str(python), "-m", f"agentrl.agents.sql.{program}"])
        return await agent.run(task, base_url=url, api_key="k")


@pytest.mark.parametrize("program", PROGRAMS)
async def test_it_tries_a_query_and_answers(program: str, frameworks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, model = heldout_tasks()[0], Model()
    model.says([("run_query", {"query": "SELECT count(*) AS n FROM products"})], f"```sql\n{task['query']}\n```")
    assert await reward_of(frameworks, program, task, model, monkeypatch) == 1.0
    assert [one["content"] for one in model.requests[1]["messages"] if one["role"] == "tool"] == ["n\n8"]
    assert "CREATE TABLE orders" in str(model.requests[0]["messages"][0]["content"])


@pytest.mark.parametrize("program", PROGRAMS)
async def test_an_endless_loop_of_calls_ends(program: str, frameworks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.says(*[[("run_query", {"query": "SELECT 1"})]] * 20)
    assert await reward_of(frameworks, program, heldout_tasks()[0], model, monkeypatch) == 0.0
    assert 3 <= len(model.requests) <= 6


def test_their_tasks_need_no_package(frameworks: Path) -> None:
    """`agentrl` is not installed there: only what the standard library has is imported of it."""
    code = (
        "import agentrl.agents.sql.sql_task as t; assert t.run_query(t.database_of({'shop': 1}), 'SELECT 1') == '1\\n1'"
    )
    env = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
    subprocess.run([frameworks, "-c", code], cwd=ROOT, env=env, check=True)
