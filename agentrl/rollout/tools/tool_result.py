"""The context, the results and the errors of tools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError


class ToolError(AgentRLError):
    """A call failed. The model reads the message and goes on."""


class ToolBroken(AgentRLError):
    """A tool cannot work, through no fault of the model's. The episode fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The result of a tool call.

    `reward` is credited to the model call that called the tool. `end` ends the loop after this turn. `error` says that
    the call failed.
    """

    text: str = ""
    reward: float | None = None
    end: bool = False
    error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolContext:
    """The episode of a tool. A parameter of this type is filled by the loop, and the model does not see it.

    `extra` is the agent's: `base_url`, `api_key`, `http_client`, … `messages` is the conversation up to the call.
    """

    task: Json
    extra: Mapping[str, Any]
    episode_id: str
    messages: list[Json] = field(default_factory=list)

    def kwargs_of(self, tool: str, kind: str) -> Json:
        """The arguments that the task has for a tool: `tools_kwargs.TOOL.KIND`, also below `extra_info`."""
        info = self.task.get("extra_info")
        for place in (self.task, info if isinstance(info, Mapping) else {}):
            of_tool = (place.get("tools_kwargs") or {}).get(tool) or {}
            if of_tool:
                return dict(of_tool.get(kind) or {})
        return {}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTool:
    """A tool of one episode. `schema` is its entry in a request's `tools`."""

    name: str
    schema: Json
    call: Callable[[Json, ToolContext], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserTurn:
    """The answer of a simulated user. `over` ends the episode; `reward` is credited to the model's last call."""

    text: str
    over: bool = False
    reward: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTools:
    """Tools that share one life: `reward` is asked at the end of the episode, then `release`. A user is without tools:
    `respond` answers a conversation.
    """

    name: str
    tools: Sequence[OpenTool]
    respond: Callable[[list[Json]], Awaitable[UserTurn]] | None = None
    reward: Callable[[], Awaitable[object]] | None = None
    release: Callable[[], Awaitable[object]] | None = None


class ToolSource(Protocol):
    """Where tools come from. It lives as long as the worker, and opens its tools for each episode."""

    async def open(self, context: ToolContext) -> OpenTools:
        """The tools of a new episode."""


def schema_of(name: str, description: str, parameters: Json) -> Json:
    """A tool's entry in a request's `tools`."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
