"""Loads configurations: YAML, `section.key=value` overrides, validation with one-line errors.

Overrides have their own parser: OmegaConf would interpolate `${…}` in values, and pydantic-settings has no presets.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from agentrl.configs.run_config import RunConfig
from agentrl.configs.section import Section
from agentrl.errors import ConfigError, did_you_mean

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""Errors of `yaml.safe_load`; ValueError for a date or a number that does not exist."""
SHORT = {"algorithm": "preset", "reward": "function"}
"""Sections that a string may stand for → the key that the string then is."""


def load_config(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read YAML from `path`, apply `section.key=value` overrides (values are YAML), and validate.

    Raises ConfigError: one line with the field and the nearest valid key.
    """
    return parse_config(read_config(path, overrides))


def read_config(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Read the mapping in a YAML file and apply the overrides, without validation. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read config {path}: {error}") from error
    try:
        data = yaml.safe_load(text)
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, got {type(data).__name__}")
    for item in overrides or []:
        apply_override(data, item)
    return data


def apply_override(data: dict[str, Any], item: str) -> None:
    """Set `a.b=value` in nested mappings. Raises ConfigError when `item` has no `=` or walks into a value.

    `trainer.algorithm` may be a preset's name: `trainer.algorithm.clip_high=0.28` then changes a part of that preset.
    In the same way `reward` may be a function's name.
    """
    key, sep, raw = item.partition("=")
    if not sep or not key:
        raise ConfigError(f"override {item!r} must look like section.key=value")
    *parents, leaf = key.split(".")
    node = data
    for part in parents:
        child = node.setdefault(part, {})
        if part in SHORT and isinstance(child, str):
            child = node[part] = {SHORT[part]: child}
        if not isinstance(child, dict):
            raise ConfigError(f"override {item!r}: {part!r} is a value, not a section")
        node = child
    try:
        node[leaf] = yaml.safe_load(raw)
    except NOT_YAML as error:
        raise ConfigError(f"override {item!r}: {raw!r} is not a YAML value") from error


def parse_config(data: dict[str, Any]) -> RunConfig:
    """Validate a mapping. Raises ConfigError with the first invalid field."""
    return validated(data, RunConfig)


Root = TypeVar("Root", bound=Section)


def validated(data: dict[str, Any], kind: type[Root]) -> Root:
    """Validate a mapping as a configuration of type `kind`. Raises ConfigError with the first invalid field."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"unknown config key {where!r}{did_you_mean(str(first['loc'][-1]), _keys_at(kind, first['loc'][:-1]))}"
            ) from None
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            choices = re.findall(r"'([^']*)'", first["ctx"]["expected"])
            raise ConfigError(
                f"config key {where!r}: there is no {first['input']!r}{did_you_mean(first['input'], choices)}"
            ) from None
        raise ConfigError(f"config key {where!r}: {first['msg']}") from None


def section_of(annotation: Any) -> type[Section] | None:
    """The section type in a field's annotation, None for other fields."""
    kinds = get_args(annotation) if get_origin(annotation) is UnionType else (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _keys_at(kind: type[Section], path: tuple[int | str, ...]) -> list[str]:
    found: Any = kind
    for part in path:
        found = get_args(found)[1] if get_origin(found) is dict else found.model_fields[str(part)].annotation
        found = section_of(found) or found
    assert issubclass(found, BaseModel)
    return list(found.model_fields)
