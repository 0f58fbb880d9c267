"""Which arguments a reward function gets."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.rollout.rewards.answers import answer_of
from agentrl.rollout.rewards.function_call import RewardFunction, Unusable, load_function

TASK = {
    "answer": "4",
    "prompt": "2+2?",
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "four"},
}
REPLY = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "message": {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
            "finish_reason": "stop",
            "token_ids": [3],
        }
    ],
}
ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]


def areal(prompt, completions, prompt_ids, completion_ids, **data):
    return 1.0


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def trl(prompts, completions, answer, **others):
    return [1.0] * len(prompts)


def ours(completion, answer, *, tolerance=0.1):
    return 1.0


class Judge:
    def __init__(self, strict=False):
        self.strict = strict

    async def __call__(self, messages, task, turn):
        return 1.0


def positional(completion, /):
    return 1.0


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ModuleType("named_rewards")
    for one in (areal, verl, trl, ours, Judge, positional):
        setattr(made, one.__name__, one)
    monkeypatch.setitem(sys.modules, "named_rewards", made)


def load(name: str, args: dict[str, Any] | None = None) -> RewardFunction:
    return load_function(f"named_rewards:{name}", args or {}, None, "reward.function")


def arguments(name: str, task: dict[str, Any] = TASK, **args: Any) -> dict[str, Any]:
    return load(name, args).arguments([answer_of(task, ASKED, REPLY, turn=1)])


def test_areals_parameters() -> None:
    whole = "<think>\ntwo and two\n</think>\n\n4"
    assert arguments("areal") == {
        "prompt": "2+2?",
        "completions": whole,
        "prompt_ids": [1, 2],
        "completion_ids": [3],
        "answer": "4",
        "data_source": "sums",
        "reward_model": TASK["reward_model"],
    }
    assert load("areal").wants_ids


def test_verls_parameters() -> None:
    found = arguments("verl")
    assert found == {
        "data_source": "sums",
        "solution_str": "<think>\ntwo and two\n</think>\n\n4",
        "ground_truth": "four",
        "extra_info": {},
    }
    assert arguments("verl", {"answer": "4"})["ground_truth"] == "4"


def test_our_parameters_and_args() -> None:
    assert arguments("ours", tolerance=0.5) == {"completion": "4", "answer": "4", "tolerance": 0.5}
    assert arguments("ours") == {"completion": "4", "answer": "4"}
    with pytest.raises(UserError, match="takes no argument 'tolerence'; did you mean 'tolerance'"):
        load("ours", {"tolerence": 1})


def test_a_batched_function_gets_lists() -> None:
    function = load("trl")
    assert function.batched
    answers = [answer_of({"answer": str(n), "n": n}, ASKED, f"it is {n}") for n in (1, 2)]
    assert function.arguments(answers) == {
        "prompts": ["2+2?", "2+2?"],
        "completions": ["it is 1", "it is 2"],
        "answer": ["1", "2"],
        "n": [1, 2],
    }


def test_a_class_is_created_once_and_called() -> None:
    function = load("Judge", {"strict": True})
    assert function.is_async
    assert function.call.strict  # type: ignore[attr-defined]
    assert sorted(function.parameters) == ["messages", "task", "turn"]
    with pytest.raises(UserError, match="does not take the arguments"):
        load("Judge", {"strickt": True})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(Unusable, match="parameter 'answer': the task has no such field; did you mean 'answers'"):
        arguments("ours", {"answers": "4"})


def test_positional_parameters_are_refused() -> None:
    with pytest.raises(UserError, match="positional-only"):
        load("positional")
