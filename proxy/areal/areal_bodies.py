"""Request bodies of AReaL's routes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from agentrl.proxy.access.request_bounds import LONGEST_KEY, Key
from agentrl.proxy.routes.request_bodies import Body


class ArealBody(Body):
    """AReaL's routes ignore fields that they do not know."""

    model_config = ConfigDict(extra="ignore")


class StartBody(ArealBody):
    """AReaL's task, and a key to use again: one that this route gave out or that the caller made.

    Keys that other routes gave out stay with their sessions. `group_size` asks as AReaL's inference service is asked:
    so many sessions of one task, in one group.
    """

    task_id: Key
    api_key: Annotated[str, Field(max_length=LONGEST_KEY, pattern=r"^[!-~]*$")] | None = None
    group_size: Annotated[int, Field(ge=0, le=1024)] | None = None


class RewardBody(ArealBody):
    """Without `interaction_id` (a response's id) the reward is the last call's."""

    interaction_id: Key | None = None
    reward: float


class ExportBody(ArealBody):
    """`session_id`, or as the inference service has it `session_ids`, merged, which `remove_session` ends.

    `encoding: list` gives plain numbers; `tensor` what AReaL's clients decode.
    """

    session_id: Key | None = None
    session_ids: Annotated[list[Key], Field(min_length=1, max_length=1024)] | None = None
    trajectory_id: int | None = None
    remove_session: bool = True
    discount: float = Field(default=1.0, ge=0, le=1)
    style: Literal["individual", "concat"] = "individual"
    encoding: Literal["tensor", "list"] = "tensor"

    @model_validator(mode="after")
    def _names_sessions(self) -> Self:
        if (self.session_id is None) == (self.session_ids is None):
            raise ValueError("name session_id, or session_ids")
        return self
