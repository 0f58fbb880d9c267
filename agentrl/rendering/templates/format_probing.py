"""Finds the output format of a chat template: the one that exactly reads back what the template writes.

The template writes probe calls with every value type, several calls, and a call without arguments; each format tries to
read them. Model names and template sources are not used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from agentrl.domain.schemas import Json
from agentrl.errors import RequestError
from agentrl.rendering.parsing.output_formats import KIMI
from agentrl.rendering.parsing.parser_choice import TEMPLATES, Reads, output_parser
from agentrl.rendering.templates.chat_template import ChatTemplate

_TYPES = {
    "word": "string",
    "exact": "boolean",
    "count": "integer",
    "low": "number",
    "tags": "array",
    "limits": "object",
}
_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds a word.",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in _TYPES.items()}},
        },
    }
    for name in ("look_up", "find")
]
_QUESTION: list[Json] = [{"role": "user", "content": "Which word?"}]
_FULL: Json = {
    "word": " é \"so\" <b>\n'x' \\ ",
    "exact": True,
    "count": -3,
    "low": 1.5,
    "tags": ["a", None, 2],
    "limits": {"low": {"é": False}},
}
_CALLS: tuple[tuple[tuple[str, Json], ...], ...] = (
    (("look_up", _FULL),),
    (("find", {}),),
    (("find", {"word": "null"}), ("look_up", {"word": "1", "exact": False})),
)


def knows_tools(template: ChatTemplate) -> bool:
    """Whether a template renders tools."""
    try:
        return template.render(_QUESTION, _TOOLS) != template.render(_QUESTION)
    except RequestError:
        return False


def find_format(template: ChatTemplate, tokenizer: Tokenizer, stop_token_ids: list[int]) -> Reads | None:
    """The first format that reads what `template` writes, or None.

    A template that cannot write arguments as values is switched to JSON text.
    """
    if "tool" not in template.source:
        return None
    for template.text_arguments in (False, True):
        for found in TEMPLATES:
            if _reads(found, template, tokenizer, stop_token_ids):
                return found
    template.text_arguments = False
    return None


def _reads(found: Reads, template: ChatTemplate, tokenizer: Tokenizer, stop_token_ids: list[int]) -> bool:
    for calls in _CALLS:
        try:
            head, text = _written(template, found, calls)
        except RequestError:  # some templates write one call at most
            if len(calls) == 1:
                return False
            continue
        prompt, ids = (tokenizer.encode(part, add_special_tokens=False).ids for part in (head, text))
        parser = output_parser(found, tokenizer, stop_token_ids if head else [], _TOOLS, prompt)
        parser.push(ids)
        read = [(call.name, json.loads(call.arguments)) for call in parser.finish().tool_calls]
        dropped = [name for name, _ in calls[len(read) :]]  # other templates write only the first
        if not read or read != list(calls[: len(read)]) or any(name in text for name in dropped):
            return False
    return True


def _written(template: ChatTemplate, found: Reads, calls: Sequence[tuple[str, Json]]) -> tuple[str, str]:
    """Render a prompt and its reply. Raises RequestError when the template rejects them.

    A template that rewrites the prompt gives "" as the prompt and the end of the conversation as the reply.
    """
    reply = {"role": "assistant", "content": "", "tool_calls": list(_as_calls(found, calls))}
    whole = template.render([*_QUESTION, reply], _TOOLS, generation_prompt=False)
    head = template.render(_QUESTION, _TOOLS)
    if not whole.startswith(head):  # the prompt opens reasoning that the template leaves out of earlier replies
        head = template.render(_QUESTION, _TOOLS, generation_prompt=False)
    if not whole.startswith(head):
        return "", whole.rpartition(_QUESTION[0]["content"])[2]
    return head, whole.removeprefix(head)


def _as_calls(found: Reads, calls: Iterable[tuple[str, Json]]) -> Iterator[Json]:
    for index, (name, arguments) in enumerate(calls):
        id = f"functions.{name}:{index}" if found is KIMI else f"probe000{index}"
        function: dict[str, Any] = {"name": name, "arguments": json.dumps(arguments)}
        yield {"id": id, "type": "function", "function": function}
