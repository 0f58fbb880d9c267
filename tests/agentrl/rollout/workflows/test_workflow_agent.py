"""How a workflow is made of a config."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agentrl.errors import UserError
from agentrl.rollout.agent import load_agent
from agentrl.rollout.workflows import workflow_context
from agentrl.rollout.workflows.model_io import GenerationHyperparameters
from agentrl.rollout.workflows.workflow_agent import WorkflowAgent

MODULE = "agentrl_workflow_of_a_test"


@pytest.fixture(autouse=True)
def module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(
        "made = []\n\n\nclass Workflow:\n    def __init__(self, **args):\n        made.append(args)\n\n"
        "    async def arun_episode(self, engine, data):\n        return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_a_mapping_of_sampling_parameters_becomes_an_object() -> None:
    load_agent(f"{MODULE}:Workflow", {"gconfig": {"max_new_tokens": 64, "greedy": True}, "turns": 2})
    import agentrl_workflow_of_a_test as found  # type: ignore[import-not-found]

    assert found.made == [{"gconfig": GenerationHyperparameters(max_new_tokens=64, greedy=True), "turns": 2}]


def test_an_unknown_sampling_parameter_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"agent_args.gconfig: there is no 'max_new_token'.*'max_new_tokens'"):
        load_agent(f"{MODULE}:Workflow", {"gconfig": {"max_new_token": 64}})


class Asks:
    """A workflow that reads what AReaL's camel and search agents read: the engine's time-out, and an HTTP client."""

    def __init__(self, closes: bool = False) -> None:
        self.closes, self.clients, self.timeouts = closes, [], []  # type: ignore[var-annotated]

    async def arun_episode(self, engine: Any, data: Any) -> None:
        client = await workflow_context.get_httpx_client()
        assert client is await workflow_context.get_httpx_client()
        self.clients.append(client)
        self.timeouts.append(engine.config.request_timeout)
        if self.closes:
            await client.aclose()
            assert not (await workflow_context.get_httpx_client()).is_closed


@pytest.mark.parametrize("closes", [False, True])
async def test_each_episode_has_an_http_client_that_ends_with_it(closes: bool) -> None:
    workflow = Asks(closes)
    async with httpx.AsyncClient(timeout=7.0) as http:
        agent = WorkflowAgent(workflow)  # type: ignore[arg-type]
        for _ in range(2):
            await agent.run({}, base_url="http://127.0.0.1:1/v1", api_key="key", http_client=http)
        assert not http.is_closed
    first, second = workflow.clients
    assert first is not second
    assert (first.is_closed, second.is_closed) == (True, True)
    assert first.timeout == httpx.Timeout(7.0)
    assert workflow.timeouts == [7.0, 7.0]


async def test_outside_of_an_episode_there_is_no_http_client() -> None:
    with pytest.raises(UserError, match="get_httpx_client: no workflow's episode is running here"):
        await workflow_context.get_httpx_client()
