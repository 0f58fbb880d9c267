"""The conversation of each main call, from a session's trace."""

from __future__ import annotations

from typing import Any

from agentrl.domain.schemas import InteractionStatus
from agentrl.rollout.rewards.call_answers import call_answers

SYSTEM = {"role": "system", "content": "be brief"}


def call(
    name: str, parent: str | None, asked: str, said: str | None, ids: tuple[int, int], **more: Any
) -> dict[str, Any]:
    return {
        "id": name,
        "parent_id": parent,
        "role": "main",
        "status": InteractionStatus.COMPLETE,
        "system": [SYSTEM],
        "new_messages": [{"role": "user", "content": asked}],
        "answer": said and {"role": "assistant", "content": said},
        "prompt_delta_ids": [ids[0]],
        "output_ids": [ids[1]],
        "finish_reason": "stop",
    } | more


def test_each_main_call_has_the_conversation_until_its_answer() -> None:
    trace = [
        call("a", None, "1", "one", (1, 2)),
        call("title", None, "title?", "Numbers", (8, 9), role="side"),
        call("b", "a", "2", "two", (3, 4)),
        call("lost", "b", "3", None, (5, 6), status="lost"),
        call("c", "a", "2 again", "deux", (7, 5), finish_reason="length"),
    ]
    found = dict(call_answers({"q": 1}, trace, is_eval=True))
    assert [one["turn"] for one in found.values()] == [1, 2, 3]
    assert list(found) == ["a", "b", "c"]
    assert [m["content"] for m in found["a"]["messages"]] == ["be brief", "1", "one"]
    assert [m["content"] for m in found["b"]["messages"]] == ["be brief", "1", "one", "2", "two"]
    assert [m["content"] for m in found["c"]["messages"]] == ["be brief", "1", "one", "2 again", "deux"]
    assert (found["c"]["prompt_ids"], found["c"]["completion_ids"]) == ([1, 2, 7], [5])
    assert (found["c"]["completion"], found["c"]["finish_reason"]) == ("deux", "length")
    assert (found["b"]["task"], found["b"]["is_eval"]) == ({"q": 1}, True)


def test_a_call_that_only_a_side_call_precedes_begins_there() -> None:
    trace = [call("t", None, "x", "y", (1, 2), role="side"), call("m", "t", "more", "z", (3, 4))]
    ((name, answer),) = call_answers({}, trace)
    assert (name, answer["turn"]) == ("m", 1)
    assert [m["content"] for m in answer["messages"]] == ["be brief", "x", "y", "more", "z"]
