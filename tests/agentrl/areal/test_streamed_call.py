"""A streamed answer, put together again."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletionChunk

from agentrl.areal.streamed_call import whole


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> ChatCompletionChunk:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "default"}
    return ChatCompletionChunk.model_validate(about | {"choices": [choice]} | fields)


def test_texts_tool_calls_and_usage_are_joined() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        named = {"id": f"call_{index}", "type": "function"} if "name" in function else {}
        return {"tool_calls": [{"index": index, "function": function} | named]}

    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    found = whole(
        [
            chunk({"role": "assistant", "content": "", "reasoning_content": None}),
            chunk({"reasoning_content": "hm"}),
            chunk({"reasoning_content": "m"}),
            chunk({"content": "Let me "}),
            chunk({"content": "look."}),
            chunk(call(0, name="find", arguments="")),
            chunk(call(0, arguments='{"a":')),
            chunk(call(0, arguments=" 1}")),
            chunk(call(1, name="open", arguments="{}")),
            chunk({}, "tool_calls"),
            chunk({}, choices=[], usage=usage),
        ]
    )
    (choice,) = found.choices
    assert (found.id, choice.finish_reason) == ("chatcmpl-1", "tool_calls")
    assert choice.message.content == "Let me look."
    assert choice.message.to_dict()["reasoning_content"] == "hmm"
    assert [(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()] == [  # type: ignore[union-attr]
        ("call_0", "find", '{"a": 1}'),
        ("call_1", "open", "{}"),
    ]
    assert found.usage is not None
    assert found.usage.total_tokens == 7


def test_an_answer_without_text_has_no_content() -> None:
    found = whole([chunk({"role": "assistant", "content": ""}), chunk({}, "length")])
    assert found.choices[0].message.content is None
