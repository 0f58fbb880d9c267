"""`import_from_string`, as AReaL has it."""

from __future__ import annotations

from typing import Any

from agentrl.user_code import load_object


def import_from_string(path: str) -> Any:
    """Import `package.module.name`; `package.module:name` is accepted too. Raises UserError."""
    module, dot, name = path.rpartition(".")
    return load_object(path if ":" in path or not dot else f"{module}:{name}", "import_from_string")
