"""Workflows against a real proxy: what is sampled, recorded, trained and refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select

from agentrl.client import AsyncClient
from agentrl.rollout.episode import Outcome, play
from agentrl.rollout.http import agent_http
from agentrl.rollout.workflows import workflow_context
from agentrl.rollout.workflows.model_io import GenerationHyperparameters, ModelRequest
from agentrl.rollout.workflows.rollout_workflow import RolloutWorkflow
from agentrl.rollout.workflows.workflow_agent import WorkflowAgent
from agentrl.store.tables import sessions, trajectories
from agentrl.testing import Reply


class TwoTurns(RolloutWorkflow):
    """Two turns in one sequence, as AReaL's multi-turn workflow builds it; `change` edits what it returns."""

    def __init__(self, change: Any = dict) -> None:
        self.change = change
        self.seen: list[Any] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import torch

        self.seen.append((workflow_context.get(), workflow_context.stat_scope(), data.pop("n")))
        ids: list[int] = [5, 6, 7]
        mask, logprobs, versions = [0] * 3, [0.0] * 3, [-1] * 3
        for _ in range(2):
            config = GenerationHyperparameters(max_new_tokens=8, stop=["zz"])
            response = await engine.agenerate(ModelRequest(input_ids=ids, gconfig=config))
            assert response.input_tokens == ids
            ids = ids + response.output_tokens + [9]
            mask += [1] * response.output_len + [0]
            logprobs += [*response.output_logprobs, 0.0]
            versions += [*response.output_versions, -1]
        return self.change(
            {
                "input_ids": torch.tensor([ids]),
                "loss_mask": torch.tensor([mask]),
                "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
                "logprobs": torch.tensor([logprobs]),
                "versions": torch.tensor([versions]),
                "rewards": torch.tensor([0.5]),
            }
        )


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "run-key", timeout_s=20) as made:
        yield made


async def episodes(proxy: Any, client: AsyncClient, workflow: Any) -> list[Outcome]:
    """One group of two episodes, one after the other."""
    group = await client.request("POST", "/groups", {})
    data, found = group["task"]["data"], []
    async with agent_http(20) as http:
        for session in group["sessions"]:
            proxy.engine.enqueue(Reply(proxy.says("ab")), Reply(proxy.says("cd")))
            opened = session | {"group_id": group["group_id"]}
            found.append(
                await play(client, WorkflowAgent(workflow), data, opened, http=http, timeout_s=60, is_eval=False)
            )
    return found


def stored(proxy: Any, outcome: Outcome) -> list[tuple[str, str | None, int]]:
    with proxy.database.read() as conn:
        rows = conn.execute(select(trajectories).where(trajectories.c.session_id == outcome.session_id)).all()
        return [(row.state, row.reason, row.trainable_tokens) for row in rows]


async def test_tensors_become_one_trajectory_with_the_recorded_tokens(proxy: Any, client: AsyncClient) -> None:
    workflow = TwoTurns()
    outcomes = await episodes(proxy, client, workflow)
    assert [(one.error, one.reward) for one in outcomes] == [(None, 0.5)] * 2
    first, second = proxy.calls({"session_id": outcomes[0].session_id})
    assert second["parent_id"] == first["id"]
    n_sampled = len(first["output_ids"]) + len(second["output_ids"])
    assert stored(proxy, outcomes[0]) == [("ready", None, n_sampled)]
    (context, scope, n), (_, _, again) = workflow.seen
    assert (scope, context.is_eval, context.task_id is None) == ("rollout", False, False)
    assert n == again  # each episode has a task of its own to change


async def test_a_part_of_the_loss_mask_trains_alone(proxy: Any, client: AsyncClient) -> None:
    def only_the_first_token(found: dict[str, Any]) -> dict[str, Any]:
        found["loss_mask"][0, 4:] = 0
        return found

    outcomes = await episodes(proxy, client, TwoTurns(only_the_first_token))
    assert [stored(proxy, one) for one in outcomes] == [[("ready", None, 1)]] * 2


async def test_none_rejects_the_episode(proxy: Any, client: AsyncClient) -> None:
    outcomes = await episodes(proxy, client, TwoTurns(lambda _: None))
    assert [one.error for one in outcomes] == [None, None]
    assert {row[:2] for one in outcomes for row in stored(proxy, one)} == {
        ("rejected", "rejected: the workflow returned None")
    }


async def test_interactions_carry_a_reward_each(proxy: Any, client: AsyncClient) -> None:
    class Named(TwoTurns):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            await super().arun_episode(engine, data)
            first, second = engine.sampled
            return {
                first.call_id: SimpleNamespace(reward=None),
                second.call_id: SimpleNamespace(reward=0.25),
            }

    outcomes = await episodes(proxy, client, Named())
    assert [one.reward for one in outcomes] == [0.25, 0.25]
    (reward,) = proxy.get(f"/sessions/{outcomes[0].session_id}")["rewards"]
    (_, second) = proxy.calls({"session_id": outcomes[0].session_id})
    assert (reward["value"], reward["interaction_id"]) == (0.25, second["id"])


async def test_tokens_that_were_never_sampled_fail_the_session_by_name(proxy: Any, client: AsyncClient) -> None:
    def lie(found: dict[str, Any]) -> dict[str, Any]:
        found["input_ids"][0, 3] += 1
        return found

    outcomes = await episodes(proxy, client, TwoTurns(lie))
    assert all("loss_mask is 1 at token 3" in str(one.error) for one in outcomes)
    with proxy.database.read() as conn:
        assert set(conn.execute(select(sessions.c.status)).scalars()) == {"failed"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 2}, "gconfig.n_samples: must be 1"),
        ({"ignore_eos": True}, "gconfig.ignore_eos"),
        ({"max_tokens": 3}, "gconfig.max_tokens: 3 leaves no room after 3 prompt tokens"),
        ({"stop_token_ids": [77]}, "gconfig.stop_token_ids: 77"),
    ],
)
def test_a_request_that_cannot_be_kept_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    tokenizer = SimpleNamespace(eos_token_id=1, pad_token_id=2)
    config = GenerationHyperparameters(**changes).new_with_stop_and_pad_token_ids(tokenizer)
    with pytest.raises(ValueError, match=message):
        ModelRequest(input_ids=[1, 2, 3], gconfig=config, tokenizer=tokenizer).body()
