"""Imports the user's code by name (`module:name`)."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from agentrl.errors import UserError, did_you_mean


def load_object(spec: str, field: str) -> Any:
    """Import `module:name`. Raises UserError with `field` and the nearest existing name."""
    module_name, sep, name = spec.partition(":")
    if not sep or not module_name or not name:
        raise UserError(f"{field}: {spec!r} must look like module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # user modules beside the config
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{field}: cannot import {module_name!r}: {error}") from error
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module_name]
        raise UserError(f"{field}: {module_name!r} has no {name!r}{did_you_mean(name, public)}") from None
