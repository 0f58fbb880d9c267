"""The length of a prompt, rendered for the run's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.data.task_shape import Measure
from agentrl.domain.schemas import Json
from agentrl.rendering.registry import load_renderer
from agentrl.rendering.validation import validate_messages


def measure_of(sources: list[TaskSource], model: Callable[[], Path]) -> Measure | None:
    """Counts the tokens of a conversation with the renderer of the folder `model()`; None if no source has a limit."""
    if not any(source.max_prompt_tokens for source in sources):
        return None
    renderer = load_renderer(model())

    def tokens(messages: list[Json]) -> int:
        validate_messages(messages)
        return len(renderer.render(messages, None))

    return tokens
