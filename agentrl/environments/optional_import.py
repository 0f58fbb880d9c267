"""Imports a library that an adapter needs, or says how it is installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from agentrl.errors import UserError


def library(name: str) -> ModuleType:
    """Import a library of the extra `gyms`. Raises UserError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package = name.replace("_", "-")
        raise UserError(
            f"{package} is not installed: pip install 'agentrl[gyms]' (in a checkout: make setup-gyms)"
        ) from None
