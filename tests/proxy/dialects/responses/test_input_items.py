"""Input items of Responses: as messages, or refused with their place."""

import pytest

from agentrl.domain.schemas import UNREAD
from agentrl.rendering.validation import validate_messages

from .response_samples import ENCRYPTED, answer, call, decode, encode, refusal


def test_items_become_messages():
    request = decode(
        instructions="be kind",
        input=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "short"}],
                "encrypted_content": "aG0=",
            },
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "let me", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "!"},
                ],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "calc", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}", "status": None},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        ],
    )
    assert request.has_instructions
    assert request.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "let me!",
            "reasoning_content": "hm",
            "tool_calls": [call("c1", "calc", "{}"), call("c2", "look", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "tool", "tool_call_id": "c2", "content": "4"},
    ]
    validate_messages(request.messages)


def user(*parts):
    return [{"role": "user", "content": "q"}, {"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (user({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}), "input[1].content[1]"),
        (user({"type": "input_file", "file_id": "x"}), "input[1].content[0]"),
        (user({"type": "input_text"}), "input[1].content[0]"),
        (user({"type": "input_text", "text": "a", "bold": True}), "input[1].content[0].bold"),
        ([{"type": "computer_call", "call_id": "c"}], "input[0]"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
        ([{"type": "web_search_call", "id": "ws_1"}], "input[0]"),
        ([{"type": "custom_tool_call", "call_id": "c", "name": "n", "input": "x"}], "input[0]"),
        ([{"id": "msg_1"}], "input[0]"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": "x", "name": "bob"}], "input[0].name"),
        ([{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}], "input[0].call_id"),
        ([{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}], "input[0].arguments"),
        (
            [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_video", "file_id": "x"}]}],
            "input[0].output[0]",
        ),
        (
            [{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA-_x"}],
            "input[0].encrypted_content",
        ),
        ([{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "/w=="}], "input[0].encrypted_content"),
    ],
)
def test_invalid_items_are_refused_with_their_place(items, param):
    error = refusal(input=items)
    assert (error.status, error.code, error.param) == (400, "invalid_messages", param)
    assert param in str(error)


def test_non_text_parts_of_a_tool_output_are_replaced_by_a_text():
    """Codex's `view_image` answers with an image."""
    parts = [
        {"type": "input_text", "text": "See "},
        {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        {"type": "input_file", "file_id": "x", "filename": "a.pdf"},
    ]
    items = [
        {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": parts},
    ]
    assert decode(input=items).messages[-1]["content"] == f"See {UNREAD}{UNREAD}"


def test_reasoning_sent_back_encrypted_is_the_same():
    sealed = encode(decode(include=[ENCRYPTED]), answer({"content": "so", "reasoning_content": "hm"})).output[0]
    item = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": sealed.encrypted_content}
    for spelled in (item, item | {"content": None}, item | {"content": []}):
        (turn,) = decode(input=[spelled]).messages
        assert turn["reasoning_content"] == "hm"
