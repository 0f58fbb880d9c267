"""The values of an algorithm's parts, from the configuration: a new value enters the tests by itself."""

from __future__ import annotations

from typing import get_args

from agentrl.configs.algorithm import Algorithm


def values(part: str) -> tuple[str, ...]:
    """The values that a part may have."""
    found = get_args(Algorithm.model_fields[part].annotation)
    assert found, f"{part} has no fixed values"
    return found


def levels_and_clips() -> list[tuple[str, str]]:
    """The pairs of `ratio` and `clip` that go together."""
    whole = ("geometric", "reinforce")  # they take the ratios of tokens
    return [
        (level, clip) for level in values("ratio") for clip in values("clip") if level == "token" or clip not in whole
    ]
