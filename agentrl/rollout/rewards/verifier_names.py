"""The verifiers that a config may name without a module."""

from __future__ import annotations

VERIFIERS: dict[str, str] = {}
"""Name → `module:function`."""
