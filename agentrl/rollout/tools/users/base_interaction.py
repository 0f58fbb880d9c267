"""The base class of verl's interactions."""

from __future__ import annotations

import uuid
from typing import Any


class BaseInteraction:
    """A user. One object serves all episodes of a process at the same time; `instance_id` says which one is meant.

    The keyword arguments are the task's `interaction_kwargs`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "user")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode. Returns the id that the other methods get."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the model: whether the episode is over, what the user says, the score of this turn, and metrics, which
        are not used.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """The score of the episode. It is asked with `rewards: final`."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End an episode."""
