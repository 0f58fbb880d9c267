"""An agent that uses a calculator as a tool (question → tool call → result → answer), and its training tasks."""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from openai import AsyncOpenAI

SIGNS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
PLAIN = {
    "+": ("What is {x} plus {y}?", "Add {x} and {y}."),
    "-": ("What is {x} minus {y}?",),
    "*": ("What is {x} times {y}?", "Multiply {x} by {y}."),
}
UNSEEN = {
    "+": ("How much is {x} added to {y}?", "Compute the sum of {x} and {y}."),
    "-": ("How much is left of {x} after {y} is taken away?",),
    "*": ("Compute the product of {x} and {y}.",),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work out an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
EXAMPLE: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "What is 12 plus 35?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_example",
                "type": "function",
                "function": {"name": "calc", "arguments": '{"expression": "12+35"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_example", "content": "47"},
    {"role": "assistant", "content": "Answer: 47"},
]


class CalculatorAgent:
    """Two turns: the model writes the call, a real calculator answers, the model reports the result."""

    def __init__(self, call_tokens: int = 12, answer_tokens: int = 8) -> None:
        self.call_tokens, self.answer_tokens = call_tokens, answer_tokens

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """Answer `data["question"]`; returns the reward, as `score` computes it."""
        client = AsyncOpenAI(base_url=extra["base_url"], api_key=extra["api_key"], http_client=extra["http_client"])
        messages: list[Any] = [*EXAMPLE, {"role": "user", "content": data["question"]}]
        request: Any = {"model": "default", "messages": messages, "tools": [TOOL]}
        first = await client.chat.completions.create(**request, max_tokens=self.call_tokens)
        message = first.choices[0].message
        calls = [call for call in message.tool_calls or [] if call.type == "function" and call.function.name == "calc"]
        if not calls:
            return 0.0
        expression = read_expression(calls[0].function.arguments)
        result = calculate(expression)
        messages += [
            message.model_dump(exclude_none=True),
            *(
                {"role": "tool", "tool_call_id": call.id, "content": "error" if result is None else str(result)}
                for call in message.tool_calls or []
            ),
        ]
        second = await client.chat.completions.create(**request, max_tokens=self.answer_tokens)
        return score(data, expression, result, second.choices[0].message.content or "")


def score(data: dict[str, Any], expression: str, result: int | None, answer: str) -> float:
    """1 for the exact answer, 0.6 for another wording, 0.4 for the right call, 0.1 for the right numbers, else 0."""
    if result is None or result != data["answer"]:
        return 0.1 if [int(n) for n in re.findall(r"\d+", expression)] == [data["x"], data["y"]] else 0.0
    if answer.strip() == f"Answer: {result}":
        return 1.0
    return 0.6 if str(result) in re.findall(r"-?\d+", answer) else 0.4


def read_expression(arguments: str) -> str:
    """The `expression` of a tool call; empty when the model wrote something else."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return ""
    expression = parsed.get("expression") if isinstance(parsed, dict) else None
    return expression if isinstance(expression, str) else ""


def calculate(expression: str) -> int | None:
    """Value of whole numbers joined by + - *; None for anything else. Never runs code."""
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError):
        return None
    return _value(tree.body)


def _value(node: ast.expr) -> int | None:
    operators = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
    match node:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int(number)) if number < 10**9:
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _value(inner)
            return None if value is None else -value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _value(left), _value(right)
            return None if a is None or b is None else SIGNS[operators[type(op)]](a, b)
        case _:
            return None


def train_tasks(seed: int = 0, count: int = 4096) -> Iterator[dict[str, Any]]:
    """`count` random questions, in plain wording, over the number pairs that are not held out."""
    return _tasks(random.Random(f"train-{seed}"), PLAIN, count, held_out=False)


def heldout_tasks() -> list[dict[str, Any]]:
    """64 fixed plain questions over held-out number pairs."""
    return list(_tasks(random.Random("held out"), PLAIN, 64, held_out=True))


def unseen_tasks() -> list[dict[str, Any]]:
    """64 fixed questions over held-out number pairs, in wordings that training does not use."""
    return list(_tasks(random.Random("unseen"), UNSEEN, 64, held_out=True))


def is_held_out(x: int, y: int) -> bool:
    """Whether a pair is held out: a fifth of all unordered pairs of two-digit numbers is."""
    low, high = sorted((x, y))
    return random.Random(low * 100 + high).random() < 0.2


def _tasks(
    rng: random.Random, phrasings: dict[str, tuple[str, ...]], count: int, *, held_out: bool
) -> Iterator[dict[str, Any]]:
    made = 0
    while made < count:
        x, y = rng.randint(10, 99), rng.randint(10, 99)
        sign = rng.choice(list(SIGNS))
        if sign == "-":
            x, y = max(x, y), min(x, y)
        phrasing = rng.choice(phrasings[sign])
        if is_held_out(x, y) == held_out:
            yield {"question": phrasing.format(x=x, y=y), "x": x, "y": y, "answer": SIGNS[sign](x, y)}
            made += 1
