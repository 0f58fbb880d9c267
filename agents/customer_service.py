"""A shop's service: a simulated customer, a database of orders that tools change, and a policy to keep.

The reward is 1 if the orders are at the end as the policy wants them, and the case was closed with the right outcome.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

from agentrl import ToolError, ToolResult, tool
from agentrl.verl import BaseInteraction

ALLOWED = {"cancel": "ordered", "change the address of": "ordered", "get my money back for": "delivered"}
"""What customers wish → the status of an order for which the policy allows it."""
NAMES = ("Ada Brook", "Ben Carver", "Cleo Dunn", "Dora Finch", "Emil Grant", "Faye Holt", "Gus Ivory", "Hana Jones")
ITEMS = ("lamp", "kettle", "tent", "radio", "drill", "clock", "rug", "chair", "scarf", "globe")
HELD_OUT_ITEMS = ("mirror", "bench", "violin", "sled")
PATIENCE = 5
"""Answers of a customer before the case is lost."""
STREETS = ("Mill Lane", "High Street", "Elm Road", "Harbour Row", "Church Hill")


class Desk:
    """The orders of one episode. The tools do what they are told; the model has to keep the policy."""

    async def create(self, task: dict[str, Any]) -> None:
        """Take the task's orders."""
        self.orders: dict[str, dict[str, Any]] = copy.deepcopy(task["orders"])
        self.expected, self.outcome, self.closed = task["expected"], task["outcome"], ""

    @tool
    async def find_orders(self, customer: str) -> dict[str, Any]:
        """Find the orders of a customer, by number.

        Args:
            customer: First and last name.
        """
        wanted = customer.casefold().strip()
        return {number: order for number, order in self.orders.items() if order["customer"].casefold() == wanted}

    @tool
    async def cancel(self, order: str) -> str:
        """Cancel an order.

        Args:
            order: The number of the order.
        """
        return self._set(order, status="cancelled")

    @tool
    async def refund(self, order: str) -> str:
        """Pay back the price of an order.

        Args:
            order: The number of the order.
        """
        return self._set(order, status="refunded")

    @tool
    async def change_address(self, order: str, address: str) -> str:
        """Change the address of an order.

        Args:
            order: The number of the order.
            address: The new street and number.
        """
        return self._set(order, address=address.strip())

    @tool
    async def close_case(self, outcome: Literal["done", "refused"]) -> ToolResult:
        """Close the case, when the wish is fulfilled, or the customer was told why it cannot be. This ends it."""
        self.closed = outcome
        return ToolResult(text="closed", end=True)

    async def calc_reward(self) -> float:
        """1 if everything is as it should be."""
        return float(self.orders == self.expected and self.closed == self.outcome)

    def _set(self, order: str, **change: str) -> str:
        if order not in self.orders:
            raise ToolError(f"there is no order {order!r}")
        self.orders[order] |= change
        return f"order {order}: {', '.join(f'{key} is now {value}' for key, value in change.items())}"


class Customer(BaseInteraction):
    """A customer who follows rules, so that no other model is needed: says the wish, and the rest only when asked."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._turns: dict[str, int] = {}

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin."""
        assert instance_id is not None
        self._turns[instance_id] = 0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer what was asked."""
        self._turns[instance_id] += 1
        asked = str((messages[-1].get("content") if messages else "") or "").casefold()
        if self._turns[instance_id] > PATIENCE:
            return True, "I have no more time. Goodbye.", None, {}
        if not any(message["role"] == "assistant" for message in messages):
            return False, f"Hello. I would like to {kwargs['wish']} the {kwargs['item']} that I ordered.", None, {}
        answers = {r"\bname\b|who are": f"I am {kwargs['name']}.", r"address|street": f"It is {kwargs['address']}."}
        answers |= {r"number|which order": f"I do not know the number. It is the order of the {kwargs['item']}."}
        said = [text for pattern, text in answers.items() if re.search(pattern, asked)]
        return False, " ".join(said) or "Please see to it.", None, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End."""
        del self._turns[instance_id]


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` cases; a third of them has a wish that the policy refuses."""
    rng = random.Random(f"train-{seed}")
    return (_case(rng, ITEMS) for _ in range(count))


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed cases about items that training does not have."""
    rng = random.Random("held out")
    return [_case(rng, HELD_OUT_ITEMS) for _ in range(64)]


def _case(rng: random.Random, items: tuple[str, ...]) -> dict[str, Any]:
    customers, wish = rng.sample(NAMES, 3), rng.choice(list(ALLOWED))
    numbers = [str(number) for number in rng.sample(range(1000, 10000), 4)]
    orders = {
        number: {"customer": customer, "item": item, "status": "shipped", "address": _address(rng)}
        for number, customer, item in zip(numbers, [customers[0], *customers], rng.sample(items, 4), strict=True)
    }
    order, address, allowed = orders[numbers[0]], _address(rng), rng.random() < 2 / 3
    order["status"] = ALLOWED[wish] if allowed else "shipped"
    expected = copy.deepcopy(orders)
    if allowed:
        done = {"cancel": {"status": "cancelled"}, "get my money back for": {"status": "refunded"}}
        expected[numbers[0]] |= done.get(wish, {"address": address})
    about = {"name": order["customer"], "item": order["item"], "wish": wish, "address": address}
    instruction = "You are {name}. You want to {wish} the {item} that you ordered. New address: {address}."
    return {
        "orders": orders,
        "expected": expected,
        "outcome": "done" if allowed else "refused",
        "interaction_kwargs": about,
        "instruction": instruction.format_map(about),
    }


def _address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"
