"""Makes a task of a row: renames columns, fills templates, measures the prompt, checks bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.domain.schemas import Json
from agentrl.errors import RequestError, UserError

MAX_TASK_BYTES = 1024 * 1024
MAX_DEPTH = 64
Measure = Callable[[list[Json]], int]
"""The number of tokens of a conversation, rendered for the run's model. Raises RequestError for one without a form."""
_jinja = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


class Shape:
    """Turns rows of one source into tasks. Raises UserError for a template that is not Jinja."""

    def __init__(self, source: TaskSource, field: str, measure: Measure | None = None) -> None:
        self._source, self._field = source, field
        self._measure = measure if source.max_prompt_tokens is not None else None
        self._prompt = None if source.prompt is None else self._template(source.prompt, "prompt")
        self._messages = [
            (message.role, self._template(message.content, f"messages.{number}.content"))
            for number, message in enumerate(source.messages or ())
        ]
        self._plain = not source.columns and self._prompt is None and not self._messages and self._measure is None

    def __call__(self, row: Any, where: Callable[[], str]) -> bytes | None:
        """The task as JSON; None if it is dropped because of its long prompt. Raises UserError with `where`."""
        if not isinstance(row, dict):
            raise UserError(f"{self._field}: {where()} is {type(row).__name__}, not a mapping")
        if not self._plain:
            shaped = self._shaped(dict(row), where)
            if shaped is None:
                return None
            row = shaped
        return self._encoded(row, where)

    def _shaped(self, row: Json, where: Callable[[], str]) -> Json | None:
        columns = self._source.columns
        if missing := columns.keys() - row.keys():
            there = ", ".join(map(str, list(row)[:20]))
            raise UserError(f"{self._field}: {where()} has no column {min(missing)!r}; it has {there}")
        renamed = ((columns.get(key, key), value) for key, value in row.items())
        named = {key: value for key, value in renamed if key is not None}
        try:
            if self._prompt is not None:
                named["prompt"] = self._prompt.render(named)
            elif self._messages:
                named["messages"] = [{"role": role, "content": text.render(named)} for role, text in self._messages]
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:  # what filters raise
            raise UserError(f"{self._field}: {where()} does not fit the template: {error}") from error
        return named if self._measure is None else self._fitting(named, self._measure, where)

    def _fitting(self, task: Json, measure: Measure, where: Callable[[], str]) -> Json | None:
        """The task if its prompt is short enough, or is made so; None if it is dropped."""
        most = self._source.max_prompt_tokens
        assert most is not None
        try:
            length = measure(_conversation(task))
            if length <= most:
                return task
            if self._source.too_long == "truncate":
                return _truncated(task, most, measure)
        except (RequestError, UserError) as error:
            raise UserError(f"{self._field}: {where()} has no prompt that can be measured: {error}") from error
        if self._source.too_long == "fail":
            raise UserError(f"{self._field}: {where()} has a prompt of {length} tokens, max_prompt_tokens is {most}")
        return None

    def _encoded(self, task: Json, where: Callable[[], str]) -> bytes:
        try:
            text = orjson.dumps(task)
        except (TypeError, orjson.JSONEncodeError) as error:
            wrong = next((key for key, value in task.items() if not _is_json(value)), None)
            at = "" if wrong is None else f", column {wrong!r}"
            hint = "" if wrong is None else f" (`columns: {{{wrong}: null}}` removes it)"
            raise UserError(f"{self._field}: {where()}{at} cannot be stored as JSON: {error}{hint}") from error
        if len(text) > MAX_TASK_BYTES:
            raise UserError(f"{self._field}: {where()} has {len(text)} bytes, a task has at most {MAX_TASK_BYTES}")
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth(task) > MAX_DEPTH:
            raise UserError(f"{self._field}: {where()} is nested deeper than {MAX_DEPTH} levels")
        return text

    def _template(self, text: str, key: str) -> Any:
        try:
            return _jinja.from_string(text)
        except TemplateError as error:
            raise UserError(f"{self._field}: {key} is not a Jinja template: {error}") from error


def _conversation(task: Json) -> list[Json]:
    prompt = task.get("messages") or task.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise UserError("it has neither `messages` nor `prompt`")
    return prompt


def _truncated(task: Json, most: int, measure: Measure) -> Json:
    """The task whose longest text of the prompt is cut at its end, so that the prompt just fits. Raises UserError."""
    messages = _conversation(task)
    texts = {i: one["content"] for i, one in enumerate(messages) if isinstance(one.get("content"), str)}
    if not texts:
        raise UserError("it has no text to truncate")
    longest = max(texts, key=lambda i: len(texts[i]))
    text = texts[longest]

    def cut(length: int) -> list[Json]:
        return [{**one, "content": text[:length]} if i == longest else one for i, one in enumerate(messages)]

    low, high = 0, len(text)  # cut(low) may fit, cut(high) does not
    if measure(cut(0)) > most:
        raise UserError(f"it is longer than {most} tokens even without its longest text")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(cut(middle)) <= most else (low, middle)
    key = "messages" if task.get("messages") else "prompt"
    return {**task, key: text[:low] if isinstance(task[key], str) else cut(low)}


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return False
    return True


def _depth(value: Any) -> int:
    """Levels of mappings and lists, without recursion."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        one, level = todo.pop()
        if isinstance(one, dict | list | tuple):
            deepest = max(deepest, level)
            todo += [(child, level + 1) for child in (one.values() if isinstance(one, dict) else one)]
    return deepest
