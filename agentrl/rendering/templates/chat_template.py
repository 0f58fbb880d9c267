"""Renders Jinja chat templates in a sandbox, with the filters and globals that model folders use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.domain.schemas import Json
from agentrl.errors import ModelFolderError, RequestError
from agentrl.rendering.messages import function_of, parse_arguments, role_of, text_of
from agentrl.rendering.options import RESERVED


class ChatTemplate:
    """The chat template of one model: messages → text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. The special tokens (`bos_token`, …) are template variables."""
        self.source = source
        self.text_arguments = False  # pass tool-call arguments as JSON text instead of values
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ModelFolderError(f"chat template does not compile: {error}") from error
        given = {*self._special_tokens, *environment.globals, *RESERVED}
        self.options = frozenset(name for name in names - given if not name.endswith("_token"))
        """Variables that a request may set."""

    def render(
        self,
        messages: list[Json],
        tools: list[Json] | None = None,
        *,
        generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation; `options` are further variables. Raises RequestError(400) when the template fails."""
        variables = {
            **self._special_tokens,
            "messages": [for_template(message, text_arguments=self.text_arguments) for message in messages],
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
            **(options or {}),
        }
        try:
            return self._template.render(variables)
        except (
            TemplateError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:  # template code may raise anything
            raise RequestError(
                400, f"the model's chat template refuses these messages: {error}", code="invalid_messages"
            ) from error


def for_template(message: Json, *, text_arguments: bool = False) -> Json:
    """Convert a message for templates: string content, no nulls, arguments as values or as JSON text."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain |= {"role": role_of(message), "content": text_of(message)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            call | {"function": _with_arguments(function_of(call), text_arguments)} for call in calls
        ]
    return plain


def _with_arguments(function: Json, as_text: bool) -> Json:
    values = parse_arguments(function.get("arguments"))
    if as_text and not isinstance(values, str):
        return function | {"arguments": json.dumps(values, ensure_ascii=False)}
    return function | {"arguments": values}


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize JSON as in training data. Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
