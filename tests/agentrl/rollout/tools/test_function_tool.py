"""Schemas, validation and calls of functions and objects as tools."""

from __future__ import annotations

import asyncio
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl import ToolContext, ToolError, UserError, tool
from agentrl.rollout.tools.function_tool import FunctionTool
from agentrl.rollout.tools.object_tools import ObjectTools


class Place(BaseModel):
    """Where."""

    city: str
    title: str = "x"


@tool
def search(
    query: str,
    limit: Annotated[int, Field(ge=1)] = 5,
    kind: Literal["any", "exact"] = "any",
    *,
    near: Place | None = None,
    context: ToolContext | None = None,
) -> str:
    """Find passages.

    The best ones come first.

    Args:
        query: words to look for
        limit: how many passages
    """
    return f"{query} {limit} {kind} {near and near.city}"


@tool(name="my-id", description="Who am I?")
async def whoami(context: ToolContext) -> str:
    return context.episode_id


def context(**task: Any) -> ToolContext:
    return ToolContext(task=task, extra={}, episode_id="e")


def test_a_schema_comes_from_signature_and_docstring() -> None:
    function = search.schema["function"]
    assert (search.schema["type"], function["name"]) == ("function", "search")
    assert function["description"] == "Find passages.\n\nThe best ones come first."
    parameters = function["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {"description": "words to look for", "type": "string"}
    limit = {"description": "how many passages", "type": "integer", "default": 5, "minimum": 1}
    assert parameters["properties"]["limit"] == limit
    assert parameters["properties"]["kind"]["enum"] == ["any", "exact"]
    assert parameters["$defs"]["Place"]["properties"]["title"] == {"type": "string", "default": "x"}
    assert whoami.schema["function"] == {
        "name": "my-id",
        "description": "Who am I?",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    }


def test_a_tool_is_still_a_function() -> None:
    assert search("a", near=Place(city="b")) == "a 5 any b"
    assert search.__doc__.startswith("Find passages.")


async def test_arguments_are_converted_and_the_context_is_filled_in() -> None:
    found = await search.opened().call({"query": "q", "limit": "3", "near": {"city": "Rome"}}, context())
    assert found == "q 3 any Rome"
    assert await whoami.opened().call({}, context()) == "e"


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        ({}, ["query is missing"]),
        ({"query": "q", "limti": 3}, ["there is no 'limti'; did you mean 'limit'?"]),
        ({"query": 7, "limit": 0}, ["query: Input should be a valid string", "limit: .*greater than or equal to 1"]),
        ({"query": "q", "kind": "all"}, ["kind: Input should be 'any' or 'exact'"]),
        ({"query": "q", "near": {}}, ["near.city is missing"]),
        ({"query": "q", "context": {}}, ["there is no 'context'"]),
    ],
)
async def test_invalid_arguments_are_named(arguments: dict, problems: list[str]) -> None:
    with pytest.raises(ToolError, match="; ".join(problems)):
        await search.opened().call(arguments, context())


def test_what_has_no_schema_is_refused() -> None:
    def many(*words: str) -> None: ...

    def thread(of: threading.Thread) -> None: ...

    for function, message in ((many, r"parameter \*words"), (thread, "no JSON schema"), (Place, "must be a function")):
        with pytest.raises(UserError, match=message):
            tool(function).schema  # noqa: B018
    with pytest.raises(UserError, match="at most 64 letters"):
        tool(name="a b")(whoami.function)


class Shop:
    """A class with state and a life."""

    lives: list[str] = []  # noqa: RUF012

    def __init__(self, stock: int = 2) -> None:
        self.stock = stock

    async def create(self, task: dict, bonus: int = 0) -> None:
        self.stock += task.get("extra", 0) + bonus

    @tool
    def buy(self, count: int) -> int:
        """Buy some.

        :param count: how many
        """
        self.stock -= count
        return self.stock

    @tool
    async def look(self) -> int:
        """Count what is left."""
        return self.stock

    def calc_reward(self, scale: float = 1.0) -> float:
        return self.stock * scale

    async def release(self) -> None:
        self.lives.append("released")


class Cheap(Shop):
    look = None  # type: ignore[assignment]


async def test_each_episode_has_an_object_of_its_own() -> None:
    source = ObjectTools.of(Shop, {"stock": 5})
    kwargs = {"create_kwargs": {"bonus": 10}, "calc_reward_kwargs": {"scale": 0.5}}
    first = await source.open(context(extra=100, extra_info={"tools_kwargs": {"Shop": kwargs}}))
    second = await source.open(context())
    buy, look = first.tools
    assert buy.schema["function"]["parameters"]["properties"] == {
        "count": {"description": "how many", "type": "integer"}
    }
    assert await asyncio.gather(*(buy.call({"count": 1}, context()) for _ in range(3))) == [114, 113, 112]
    assert (await look.call({}, context()), await second.tools[1].call({}, context())) == (112, 5)
    assert first.reward is not None
    assert first.release is not None
    assert await first.reward() == 56.0
    await first.release()
    assert Shop.lives == ["released"]


async def test_an_object_may_be_given_and_a_class_may_drop_a_tool() -> None:
    shop = Shop(1)
    assert isinstance(shop.buy, FunctionTool)
    opened = await ObjectTools.of(shop).open(context())
    assert await opened.tools[0].call({"count": 1}, context()) == shop.stock == 0
    assert [one.name for one in (await ObjectTools.of(Cheap).open(context())).tools] == ["buy"]
    assert ObjectTools.of(Place) is None
    with pytest.raises(UserError, match="Shop does not take these arguments"):
        ObjectTools.of(Shop, {"stok": 1})
    with pytest.raises(UserError, match="'buy' is a method"):
        Shop.__dict__["buy"].opened()
