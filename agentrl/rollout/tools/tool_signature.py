"""The arguments of a function as a JSON schema, and their validation."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import docstring_parser
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ArgsKwargs

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.tools.tool_result import ToolContext, ToolError

MAX_PROBLEMS = 8
"""How many invalid arguments an error lists."""


class ToolSignature:
    """The arguments that a function takes from the model, described by `schema`. `context_name` is the parameter for
    ToolContext.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, is_method: bool = False) -> None:
        parameters = _parameters(function, name)
        if is_method:
            parameters.pop(next(iter(parameters)))
        self.context_name = next((key for key, one in parameters.items() if _is_context(one.annotation)), None)
        parameters.pop(self.context_name or "", None)
        described = docstring_parser.parse(inspect.getdoc(function) or "")
        about = {param.arg_name: param.description or "" for param in described.params}
        self.description = "\n\n".join(filter(None, (described.short_description, described.long_description)))
        self._names = list(parameters)

        def collected(**arguments: Any) -> Json:
            return arguments

        fields = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_described(parameter, about.get(key)))
            for key, parameter in parameters.items()
        ]
        collected.__signature__ = inspect.Signature(fields)  # type: ignore[attr-defined]
        collected.__annotations__ = {field.name: field.annotation for field in fields}
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(collected)  # type: ignore[arg-type]  # a function is one too
            self.schema = _without_titles(self._adapter.json_schema())
        except (PydanticUserError, TypeError) as error:
            raise UserError(f"tool {name}: its parameters have no JSON schema: {str(error).splitlines()[0]}") from None

    def validated(self, arguments: Mapping[str, Any]) -> Json:
        """The function's keyword arguments. Raises ToolError, which names each invalid one."""
        try:
            found: Json = self._adapter.validator.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            problems = [self._problem(one) for one in error.errors(include_url=False)[:MAX_PROBLEMS]]
            raise ToolError(f"invalid arguments: {'; '.join(problems)}") from None
        return found

    def _problem(self, error: Any) -> str:
        where = ".".join(map(str, error["loc"]))
        if error["type"].startswith("missing"):
            return f"{where} is missing"
        if error["type"] == "unexpected_keyword_argument":
            hint = did_you_mean(where, self._names) if self._names else "; it takes no arguments"
            return f"there is no {where!r}{hint}"
        return f"{where}: {error['msg']}"


def _parameters(function: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """The parameters, with evaluated annotations. Raises UserError for those that a model cannot name."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool {name}: a type of its parameters cannot be resolved: {error}") from None
    found = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tool {name}: parameter {parameter} is not supported; give each parameter a name")
        found[key] = parameter.replace(annotation=hints.get(key, Any))
    return found


def _is_context(annotation: Any) -> bool:
    return annotation is ToolContext or ToolContext in typing.get_args(annotation)


def _described(parameter: inspect.Parameter, text: str | None) -> Any:
    return Annotated[parameter.annotation, Field(description=text)] if text else parameter.annotation


def _without_titles(schema: Any) -> Any:
    """The schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(one) for name, one in value.items()}
        if key in ("properties", "$defs")
        else (value if key in ("default", "enum", "const", "examples") else _without_titles(value))
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
