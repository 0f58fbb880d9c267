"""The customer service: what the customer says, what the tools change, and what a case earns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.customer_service import PATIENCE, heldout_tasks, train_tasks
from agentrl.configs.config_files import load_config
from agentrl.rollout.agent import load_agent

CONFIG = load_config(Path(__file__).parents[2] / "agents" / "customer_service.yaml")
TASKS = heldout_tasks()


def case(wish: str, outcome: str = "done") -> dict[str, Any]:
    return next(one for one in TASKS if (one["interaction_kwargs"]["wish"], one["outcome"]) == (wish, outcome))


def order_of(task: dict[str, Any]) -> str:
    about = task["interaction_kwargs"]
    (number,) = (
        number
        for number, order in task["orders"].items()
        if (order["customer"], order["item"]) == (about["name"], about["item"])
    )
    return str(number)


async def play(task: dict[str, Any], extra: Any) -> dict[str, float]:
    result = await load_agent(CONFIG.agent, CONFIG.agent_args).run(task, **extra)
    return {reward.name: reward.value for reward in result.rewards}


async def test_a_case_is_a_conversation(model: Any, extra: Any, said: Any) -> None:
    task = case("change the address of")
    about, number = task["interaction_kwargs"], order_of(task)
    model.says("Of course. What is your name, and what is the new address?")
    model.says([("find_orders", {"customer": about["name"].upper()})])
    model.says([("change_address", {"order": number, "address": about["address"]})])
    model.says("It is done.", [("close_case", {"outcome": "done"})])
    assert await play(task, extra) == {"Desk": 1.0}
    users = [one["content"] for one in model.requests[-1]["messages"] if one["role"] == "user"]
    assert users == [
        f"Hello. I would like to change the address of the {about['item']} that I ordered.",
        f"I am {about['name']}. It is {about['address']}.",
        "Please see to it.",
    ]
    found, changed = said(-1)
    assert number in found
    assert changed == f"order {number}: address is now {about['address']}"


@pytest.mark.parametrize("wish", ["cancel", "get my money back for"])
@pytest.mark.parametrize(("outcome", "does"), [("done", True), ("refused", False), ("refused", True), ("done", False)])
async def test_a_case_earns_1_if_the_policy_is_kept(
    model: Any, extra: Any, wish: str, outcome: str, does: bool
) -> None:
    task = case(wish, outcome)
    change = [("cancel" if wish == "cancel" else "refund", {"order": order_of(task)})]
    model.says(*([change] if does else []), [("close_case", {"outcome": outcome})])
    assert await play(task, extra) == {"Desk": float(does == (outcome == "done"))}


async def test_a_case_that_is_not_closed_earns_nothing(model: Any, extra: Any) -> None:
    task = case("cancel", "refused")
    model.says(*["Let me see."] * (PATIENCE + 1))
    assert await play(task, extra) == {"Desk": 0.0}
    assert len(model.requests) == PATIENCE


async def test_episodes_do_not_share_orders(model: Any, extra: Any, said: Any) -> None:
    task = case("cancel")
    before = str(task)
    model.says(
        [("cancel", {"order": order_of(task)}), ("cancel", {"order": "1"})], [("close_case", {"outcome": "done"})]
    )
    assert await play(task, extra) == {"Desk": 1.0}
    assert said(1)[1] == "error: there is no order '1'"
    assert str(task) == before


def test_held_out_cases_are_not_trained() -> None:
    def items(tasks: Any) -> set[str]:
        return {order["item"] for task in tasks for order in task["orders"].values()}

    assert items(TASKS).isdisjoint(items(train_tasks(count=200)))
    refused = sum(task["outcome"] == "refused" for task in train_tasks(count=300))
    assert 60 < refused < 140
    assert list(train_tasks(seed=3, count=5)) == list(train_tasks(seed=3, count=5))
