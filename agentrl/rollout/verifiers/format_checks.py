"""Checks the form of an answer: a regular expression, thinking tags, JSON that fits a schema."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.rollout.rewards.function_call import Unusable
from agentrl.rollout.rewards.function_value import Graded

THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def regex(completions: str, pattern: str, full: bool = False) -> float:
    """1 if the whole text that the model wrote, thinking included, matches `pattern` somewhere, or with `full` from
    its beginning to its end. The first group of `pattern`, if it has one, is the answer: that of the last match.
    """
    expression = re.compile(pattern, re.DOTALL if full else re.MULTILINE)
    matches = [expression.fullmatch(completions)] if full else list(expression.finditer(completions))
    value = float(any(matches))
    if not expression.groups:
        return value
    return Graded(value, matches[-1][1] if matches and matches[-1] else None)


def think_format(completions: str) -> float:
    """1 if the text begins with thinking in one pair of `<think>` tags, and an answer follows."""
    matched = THINKING.fullmatch(completions)
    if matched is None:
        return 0.0
    thought, answer = matched[1].strip(), matched[2].strip()
    return float(bool(thought and answer) and not any(tag in thought + answer for tag in ("<think>", "</think>")))


def json_schema(completion: str, schema: Any) -> float:
    """1 if the answer is JSON that fits the schema, alone or in a fenced block. `schema` is an argument or a field of
    the task: a mapping, or JSON text. Raises Unusable for an invalid schema.
    """
    import jsonschema_rs

    if isinstance(schema, str):
        schema = json.loads(schema)
    try:
        validator = jsonschema_rs.validator_for(schema, retriever=_nothing)
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise Unusable(f"the schema is not valid: {str(error)[:300]}") from None
    fenced = FENCED.findall(completion)
    try:
        value = json.loads(fenced[-1] if fenced else completion)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


def _nothing(url: str) -> Any:
    """A schema's references to other documents are not followed."""
    raise ValueError(f"the schema refers to {url}")
