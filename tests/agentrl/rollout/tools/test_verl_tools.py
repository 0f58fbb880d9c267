"""Tools written for verl: their life, the arguments that they get, and their rewards."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from agentrl import ToolBroken, ToolLoop, UserError
from agentrl.rollout.score import Reward
from agentrl.rollout.tools.tool_entries import sources_of
from agentrl.verl import BaseTool, OpenAIFunctionToolSchema, ToolResponse, rollout_trace_op

ASK = [{"role": "user", "content": "go"}]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "submit",
        "description": "Submit an answer.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "array", "items": {"type": "integer"}, "description": "numbers"}},
            "required": ["answer"],
        },
    },
}


class Submit(BaseTool):
    """One object with a state for each episode, as verl's examples are."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.states: dict[str, dict[str, Any]] = {}
        self.log: list[Any] = []

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        assert kwargs["create_kwargs"].get("ground_truth") == ground_truth
        assert instance_id is not None
        self.states[instance_id] = {"truth": ground_truth, "best": 0.0}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict, **kwargs: Any) -> tuple[ToolResponse, float, dict]:
        state = self.states[instance_id]
        self.log.append((sorted(kwargs), kwargs["agent_data"].messages[0]["content"]))
        right = parameters["answer"] == state["truth"]
        step = 0.0 if right else self.config["penalty"]
        state["best"] = max(state["best"], float(right))
        return ToolResponse(text=f"right: {right}", image=[object()] if right else None), step, {}

    async def calc_reward(self, instance_id: str, scale: float = 1.0, **kwargs: Any) -> float:
        return self.states[instance_id]["best"] * scale

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(kwargs)
        del self.states[instance_id]


class Old(BaseTool):
    """As tools were in earlier versions: `create` returns the id, `execute` a text."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "old", "description": "Old."}}
        )

    async def create(self, instance_id: str | None = None) -> str:  # type: ignore[override]
        return "mine"

    async def execute(self, instance_id: str, parameters: dict) -> Any:  # type: ignore[override]
        return f"{instance_id} {parameters}"


def entry(**config: Any) -> dict[str, Any]:
    return {"class_name": f"{__name__}.Submit", "config": {"penalty": -0.25, **config}, "tool_schema": SCHEMA}


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """This module under its name, from which entries load it."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Submit.__module__])


async def test_a_tool_lives_as_long_as_its_episode(model: Any, extra: Any, said: Any) -> None:
    (source,) = sources_of([entry()])
    kwargs = {"create_kwargs": {"ground_truth": [1, 2]}, "calc_reward_kwargs": {"scale": 2.0}}
    task = {"extra_info": {"tools_kwargs": {"submit": kwargs | {"release_kwargs": {"why": "end"}}}}}
    model.says([("submit", {"answer": [1]}), ("submit", {"answer": [2]})], [("submit", {"answer": [1, 2]})], "done")
    async with ToolLoop(extra, [source], task=task) as loop, ToolLoop(extra, [source]):
        await loop.run(ASK)
        tool: Any = source._tool  # type: ignore[attr-defined]
        assert len(tool.states) == 2
        result = await loop.result()
    assert said(2) == ["right: False", "right: False", "right: True\n[1 image]"]
    assert result.rewards == (
        Reward(value=-0.5, interaction_id="c1", name="submit", source="tool"),
        Reward(value=0.0, interaction_id="c2", name="submit", source="tool"),
        Reward(value=2.0, name="submit", source="tool"),
    )
    assert tool.states == {}
    assert tool.log == [(["agent_data"], "go")] * 3 + [{}, {"why": "end"}]
    assert model.requests[0]["tools"] == [SCHEMA]


async def test_tools_of_earlier_versions_run_too(model: Any, extra: Any, said: Any) -> None:
    model.says([("old", {"a": 1})], "done")
    async with ToolLoop(extra, [Old]) as loop:
        await loop.run(ASK)
        assert (await loop.result(1.0)).rewards == (Reward(value=1.0),)
    assert said(1) == ["mine {'a': 1}"]


@pytest.mark.parametrize(("found", "value"), [([1, 0.5], 1.5), ([], 0.0), (["text"], None), (float("nan"), None)])
async def test_the_reward_of_an_episode_is_a_number(extra: Any, found: Any, value: float | None) -> None:
    class Listing(Old):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
            return found

    async with ToolLoop(extra, [Listing({}, None)]) as loop:
        if value is None:
            with pytest.raises(ToolBroken, match="number"):
                await loop.rewards()
        else:
            assert await loop.rewards() == (Reward(value=value, name="old", source="tool"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_name": "nowhere.Tool"}, r"tools\[0\].class_name: cannot import 'nowhere'"),
        ({"class_name": "pathlib.Path"}, "must be a class with `create`, `execute` and `release`"),
        ({"tool_schema": {"function": {}}}, r"tools\[0\].tool_schema.function.name: Field required"),
        ({"tool_schema": None}, "Submit has no schema"),
        ({"schema": {}}, "there is no key 'schema'; did you mean 'tool_schema'"),
    ],
)
def test_a_wrong_entry_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources_of([entry() | change])
