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
    """AReaL's task id, and optionally the session's key: an earlier key of this route, or a key that the caller made.

    Keys of other routes belong to their sessions and are refused. As in AReaL's inference service, `group_size` is the
    number of sessions to open, in one group, for the task.
    """

    task_id: Key
    api_key: Annotated[str, Field(max_length=LONGEST_KEY, pattern=r"^[!-~]*$")] | None = None
    group_size: Annotated[int, Field(ge=0, le=1024)] | None = None


class RewardBody(ArealBody):
    """A reward of a call or, without `interaction_id` (a response's id), of the last call."""

    interaction_id: Key | None = None
    reward: float


class ExportBody(ArealBody):
    """The session to export: `session_id`, or `session_ids` as in AReaL's inference service, merged in one export.
    `remove_session` ends the sessions of `session_ids`.

    `encoding`: `list` for plain numbers, `tensor` for the encoding that AReaL's clients decode.
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
