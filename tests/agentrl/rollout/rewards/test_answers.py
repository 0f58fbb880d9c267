"""What reward functions learn about an answer."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from agentrl.errors import UserError
from agentrl.rollout.rewards.answers import answer_of

SAID = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
BODY = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [{"index": 0, "message": SAID, "finish_reason": "stop", "token_ids": [3]}],
}


def test_objects_of_the_sdk_become_json() -> None:
    earlier = ChatCompletionMessage(role="assistant", content="5")
    asked = [{"role": "user", "content": "2+2?"}, earlier, {"role": "user", "content": "no"}]
    answer = answer_of({"n": 1}, asked, ChatCompletion.model_validate(BODY), turn=2)
    assert json.loads(json.dumps(answer)) == answer
    assert answer == {
        "task": {"n": 1},
        "turn": 2,
        "messages": [asked[0], {"role": "assistant", "content": "5"}, asked[2], SAID],
        "completion": "4",
        "reasoning": "2 and 2",
        "finish_reason": "stop",
        "prompt_ids": [1, 2],
        "completion_ids": [3],
    }


def test_a_text_or_the_json_of_a_completion_is_a_reply() -> None:
    text = answer_of({}, [], "4")
    assert (text["completion"], text["messages"]) == ("4", [{"role": "assistant", "content": "4"}])
    assert answer_of({}, [], BODY)["completion"] == "4"


@pytest.mark.parametrize("reply", [None, 7, {}, {"choices": []}, [BODY]])
def test_anything_else_is_refused(reply: object) -> None:
    with pytest.raises(UserError, match="must be a chat completion or a text"):
        answer_of({}, [], reply)
