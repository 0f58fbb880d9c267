"""verl's interactions as users of an episode."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentrl.domain.schemas import Json
from agentrl.rollout.tools.tool_result import OpenTools, ToolContext, UserTurn

METHODS = ("start_interaction", "generate_response", "finalize_interaction")


class InteractionUser:
    """The source of a user. `final`: the reward is that of `calculate_score` at the end, else that of each turn."""

    def __init__(self, interaction: Any, name: str, *, final: bool = False) -> None:
        self._interaction, self._name, self._final = interaction, name, final

    async def open(self, context: ToolContext) -> OpenTools:
        """Begin the interaction of an episode."""
        found, kwargs = self._interaction, _kwargs_of(context.task)
        instance_id = await found.start_interaction(str(uuid.uuid4()), **kwargs)
        about = {"instance_id": instance_id, **kwargs}

        async def respond(messages: list[Json]) -> UserTurn:
            over, text, score, *_ = await found.generate_response(instance_id, messages, **kwargs)
            return UserTurn(text=text or "", over=bool(over), reward=None if self._final else score)

        return OpenTools(
            name=self._name,
            tools=(),
            respond=respond,
            reward=partial(_called, found.calculate_score, about) if self._final else None,
            release=partial(_called, found.finalize_interaction, about),
        )


def is_interaction(found: object) -> bool:
    """Whether it is a class of verl's interactions, or an object of one."""
    return all(callable(getattr(found, name, None)) for name in METHODS)


def _kwargs_of(task: Json) -> Json:
    """The task's `interaction_kwargs`, at its top or in `extra_info`."""
    info = task.get("extra_info")
    below = info.get("interaction_kwargs") if isinstance(info, Mapping) else None
    return dict(task.get("interaction_kwargs") or below or {})


async def _called(function: Callable[..., Any], about: Json) -> Any:
    """Call a method with those of the arguments that it takes: `instance_id` and the task's."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters}
    return await function(**{name: value for name, value in about.items() if takes_all or name in names})
