"""The `python` tool runs programs apart from this machine, and each problem has the answer that a program gives."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from agentrl.agents import python_math
from agentrl.agents.python_math import heldout_tasks, python, train_tasks
from agentrl.rollout.rewards.verifier_names import VERIFIERS
from agentrl.rollout.tools.tool_agent import ToolAgent
from agentrl.sandbox import Limits
from agentrl.user_code import load_object

CHECKS = {
    "primes": "sum(p for p in range(2, {0}) if not any(p % d == 0 for d in range(2, p)))",
    "divisors": "len([d for d in range(1, {0} + 1) if {0} % d == 0])",
    "digits": "sum(int(d) for d in str({0} ** {1}))",
    "multiples": "len(set(range({2}, {1} + 1, {2})) | set(range({3}, {1} + 1, {3})))",
}


async def test_a_program_answers_with_what_it_prints(model: Any, extra: Any, said: Any) -> None:
    model.says([("python", {"code": "print(6 * 7)"}), ("python", {"code": "1 / 0"})], r"It is \boxed{42}.")

    async def score(messages: Any, reply: Any) -> float:
        verify: Any = load_object(VERIFIERS["math"], "reward")()
        return float(verify(reply.choices[0].message.content, "42"))

    result = await ToolAgent(tools=["agentrl.agents.python_math:python"]).run({"question": "?"}, **extra, score=score)
    assert said(1) == ["42", said(1)[1]]
    assert said(1)[1].endswith("ZeroDivisionError: division by zero")
    assert [reward.value for reward in result.rewards] == [1.0]


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("", "(the program printed nothing)"),
        ("raise SystemExit(3)", "error: exit status 3"),
        ("while True: pass", "error: the program ran longer than 0.5 s"),
        ("print('x' * 10_000)", "error: the program printed more than 8,192 bytes"),
    ],
)
async def test_a_program_that_goes_wrong_says_how(
    model: Any, extra: Any, said: Any, monkeypatch: pytest.MonkeyPatch, code: str, answer: str
) -> None:
    slow = "while" in code
    limits = Limits(time_s=0.5 if slow else 60.0, memory_mb=512, processes=16, output_bytes=8_192)
    monkeypatch.setattr(python_math, "LIMITS", limits)
    model.says([("python", {"code": code})], "done")
    agent = ToolAgent(tools=[python])
    with pytest.raises(Exception, match="no reward"):
        await agent.run({"question": "?"}, **extra)
    assert said(1) == [answer]


def test_answers_are_what_another_program_finds() -> None:
    import re

    for task in [*heldout_tasks(), *islice(train_tasks(), 64)]:
        if check := CHECKS.get(task["source"]):
            numbers = re.findall(r"\d+", task["question"])
            assert task["answer"] == str(eval(check.format(*numbers))), task


def test_held_out_problems_are_not_trained() -> None:
    held_out = {task["question"] for task in heldout_tasks()}
    assert held_out.isdisjoint(task["question"] for task in train_tasks())
    assert {task["source"] for task in heldout_tasks()} == {"primes", "divisors", "digits", "multiples", "paths"}
