"""Reads the user of an agent: a class of verl's interactions, or a model that plays one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agentrl.configs.config_files import validated
from agentrl.errors import ConfigError, UserError, did_you_mean
from agentrl.rollout.tools.tool_result import ToolSource
from agentrl.rollout.tools.users.interaction_user import InteractionUser, is_interaction
from agentrl.rollout.tools.users.model_user import ModelUser, ModelUserEntry
from agentrl.user_code import load_object

NAME = "user"
"""The name of a user's rewards, unless it has one."""
KEYS = ("class_name", "config", "name", "rewards")
KINDS = ("turn", "final")


def user_of(entry: object) -> ToolSource:
    """The source of a user. Raises UserError."""
    if isinstance(entry, Mapping) and "model" in entry:
        try:
            return ModelUser(validated(dict(entry), ModelUserEntry), NAME)
        except ConfigError as error:
            raise UserError(f"user: {str(error).replace('config key ', '')}") from None
    if isinstance(entry, str):
        entry = {"class_name": entry}
    if isinstance(entry, Mapping):
        return _of_mapping(entry)
    if isinstance(entry, ModelUser | InteractionUser):
        return entry
    if not is_interaction(entry) or inspect.isclass(entry):
        raise UserError(f"user: {entry!r} must be an object with `generate_response`, a class's name, or a mapping")
    return InteractionUser(entry, getattr(entry, "name", NAME))


def _of_mapping(entry: Mapping[str, Any]) -> InteractionUser:
    if unknown := sorted(map(str, entry.keys() - {*KEYS})):
        raise UserError(f"user: there is no key {unknown[0]!r}{did_you_mean(unknown[0], [*KEYS, 'model'])}")
    if "class_name" not in entry:
        raise UserError("user: needs the key `class_name` or `model`")
    name, rewards = str(entry["class_name"]), entry.get("rewards", KINDS[0])
    if rewards not in KINDS:
        raise UserError(f"user.rewards: there is no {rewards!r}{did_you_mean(str(rewards), KINDS)}")
    found = load_object(name if ":" in name else ":".join(name.rsplit(".", 1)), "user.class_name")
    if not inspect.isclass(found) or not is_interaction(found):
        raise UserError(f"user.class_name: {name!r} must be a class with `generate_response`")
    make: Any = found
    own = str(entry.get("name", NAME))
    return InteractionUser(make(config={**(entry.get("config") or {}), "name": own}), own, final=rewards == KINDS[1])
