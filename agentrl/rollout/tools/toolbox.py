"""The tools of one episode: opened together, called, asked for rewards, and each released exactly once.

    CLOSED ──open every source──► OPEN ──calls, rewards──► RELEASING ──► RELEASED
              │ one fails                                     ▲
              └───────────────────────────────────────────────┘

Everything that was opened is released, whatever ends the episode: its result, an error, a time-out, a cancellation. An
`open` that is still running then gets LATE_S to end, and what it opened is released too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from pydantic_core import PydanticSerializationError, to_json

from agentrl.domain.schemas import Json
from agentrl.errors import UserError, did_you_mean
from agentrl.rollout.score import finite
from agentrl.rollout.tools.bounded_call import TookTooLong, WasCancelled, bounded, cancel
from agentrl.rollout.tools.tool_limits import ToolLimits, cut
from agentrl.rollout.tools.tool_result import (
    OpenTool,
    OpenTools,
    ToolBroken,
    ToolContext,
    ToolError,
    ToolResult,
    ToolSource,
    UserTurn,
)

OPEN_S = 620.0
"""How long a source may take to open."""
RELEASE_S = 5.0
"""How long the release of one tool may take. All tools are released at the same time."""
LATE_S = 2.0
"""How long a source that is being opened may take to finish when the episode ends."""
MAX_CALLS = 64
"""Calls of one turn that are executed. Each further one gets an error."""

logger = logging.getLogger(__name__)
_releasing: set[asyncio.Task[None]] = set()


class Toolbox:
    """The open tools. A context manager: they are released at the end of its block."""

    def __init__(
        self,
        sources: Sequence[ToolSource],
        context: ToolContext,
        *,
        limits: ToolLimits | None = None,
        overrides: Mapping[str, ToolLimits] | None = None,
        parallel: int = 8,
    ) -> None:
        self._sources, self._context = sources, context
        self._limits, self._overrides = limits or ToolLimits(), dict(overrides or {})
        self._opening: list[asyncio.Task[OpenTools]] = []
        self._opened: list[OpenTools] = []
        self._tools: dict[str, tuple[OpenTool, OpenTools]] = {}
        self._places = asyncio.Semaphore(parallel)
        self._released: asyncio.Task[None] | None = None

    @property
    def schemas(self) -> list[Json]:
        """The entries of a request's `tools`."""
        return [tool.schema for tool, _ in self._tools.values()]

    def limits_of(self, name: str) -> ToolLimits:
        """The limits of a tool."""
        return self._overrides.get(name, self._limits)

    def source_of(self, name: str) -> str:
        """The source of the rewards of a name."""
        return "user" if any(one.respond is not None and one.name == name for one in self._opened) else "tool"

    async def __aenter__(self) -> Self:
        try:
            for source in self._sources:
                opening = asyncio.ensure_future(source.open(self._context))
                self._opening.append(opening)
                await self._add(opening)
            unknown = sorted(self._overrides.keys() - self._tools.keys() - {one.name for one in self._opened})
            if unknown:
                raise UserError(f"overrides: there is no tool {unknown[0]!r}{did_you_mean(unknown[0], self._tools)}")
        except BaseException:
            await self.release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _add(self, opening: asyncio.Task[OpenTools]) -> None:
        await asyncio.wait([opening], timeout=OPEN_S)
        if not opening.done():
            raise ToolBroken(f"a tool was not created within {OPEN_S:g} s")
        opened = opening.result()
        self._opened.append(opened)
        for tool in opened.tools:
            if tool.name in self._tools:
                raise UserError(f"tools: two tools are called {tool.name!r}")
            self._tools[tool.name] = (tool, opened)

    async def call_all(self, calls: Sequence[Any], messages: Sequence[Json] = ()) -> list[ToolResult]:
        """The results of one turn's tool calls (the SDK's), in their order. Raises what fails the episode."""
        context = self._context
        context.messages[:] = messages
        # No TaskGroup: in Python 3.11 its failure leaves this task marked as cancelled, and later time-outs are missed.
        running = [asyncio.ensure_future(self._placed(call, number)) for number, call in enumerate(calls)]
        try:
            if running:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in running:
                task.cancel()
            found = await asyncio.gather(*running, return_exceptions=True)
        results = [one for one in found if isinstance(one, ToolResult)]
        if failure := next((one for one in found if isinstance(one, Exception)), None):
            raise failure
        return results

    async def _placed(self, call: Any, number: int) -> ToolResult:
        if number >= MAX_CALLS:
            return ToolResult(text=f"error: at most {MAX_CALLS} calls in one turn", error=True)
        async with self._places:
            return await self._call(call.function.name, call.function.arguments)

    async def _call(self, name: str, arguments: str) -> ToolResult:
        limits = self.limits_of(name)
        try:
            if name not in self._tools:
                raise ToolError(f"there is no tool {name!r}{did_you_mean(name, self._tools)}")
            found = await bounded(self._tools[name][0].call(_parsed(arguments), self._context), limits.timeout_s)
            result = found if isinstance(found, ToolResult) else ToolResult(text=_text(found))
        except ToolBroken:
            raise
        except ToolError as error:
            result = ToolResult(text=f"error: {error}", error=True)
        except TookTooLong:
            result = ToolResult(text=f"error: {name} took longer than {limits.timeout_s:g} s", error=True)
        except WasCancelled:
            result = ToolResult(text=f"error: {name} was cancelled", error=True)
        except Exception as error:
            if limits.on_error == "fail":
                raise ToolBroken(f"tool {name}: {type(error).__name__}: {error}") from error
            result = ToolResult(text=f"error: {type(error).__name__}: {error}", error=True)
        reward = None if result.reward is None else _number(result.reward, name)
        return replace(result, text=cut(result.text, limits), reward=reward)

    async def respond(self, messages: Sequence[Json]) -> tuple[str, UserTurn] | None:
        """The name of the user, and its answer; None without a user. Raises ToolBroken when the user fails."""
        user = next((opened for opened in self._opened if opened.respond is not None), None)
        if user is None or user.respond is None:
            return None
        try:
            turn: UserTurn = await bounded(user.respond(list(messages)), self.limits_of(user.name).timeout_s)
        except ToolBroken:
            raise
        except TookTooLong:
            raise ToolBroken(f"the user took longer than {self.limits_of(user.name).timeout_s:g} s") from None
        except Exception as error:
            raise ToolBroken(f"the user failed: {type(error).__name__}: {error}") from error
        reward = None if turn.reward is None else _number(turn.reward, user.name)
        return user.name, replace(turn, text=cut(turn.text, self.limits_of(user.name)), reward=reward)

    async def rewards(self) -> dict[str, float]:
        """What each tool that has a reward gives at the end of the episode, by name. Raises ToolBroken."""
        found = {}
        for opened in self._opened:
            if opened.reward is None:
                continue
            try:
                value = await bounded(opened.reward(), self.limits_of(opened.name).timeout_s)
            except TookTooLong:
                raise ToolBroken(f"the reward of tool {opened.name} took too long") from None
            if value is not None:
                found[opened.name] = _number(value, opened.name)
        return found

    async def release(self) -> None:
        """Release all tools. It goes on if the caller is cancelled; a further call waits for the same release."""
        if self._released is None:
            self._released = asyncio.create_task(self._release_all())
            _releasing.add(self._released)
            self._released.add_done_callback(_releasing.discard)
        await asyncio.shield(self._released)

    async def _release_all(self) -> None:
        if late := [task for task in self._opening if not task.done()]:
            await asyncio.wait(late, timeout=LATE_S)
        for task in self._opening:
            if not task.done():
                await cancel(task)
        await asyncio.gather(*(_release(task.result()) for task in self._opening if _succeeded(task)))


def _succeeded(task: asyncio.Task[OpenTools]) -> bool:
    """Whether a source was opened, even after the episode stopped waiting for it."""
    return task.done() and not task.cancelled() and task.exception() is None


async def _release(opened: OpenTools) -> None:
    """Release tools. A failure is logged: the episode's result is known by now, and others are to be released."""
    if opened.release is None:
        return
    try:
        await bounded(opened.release(), RELEASE_S)
    except TookTooLong:
        logger.warning("the release of tool %s took longer than %g s", opened.name, RELEASE_S)
    except Exception as error:  # noqa: BLE001 - foreign code
        logger.warning("the release of tool %s failed: %s: %s", opened.name, type(error).__name__, error)


def _number(value: object, name: str) -> float:
    """A reward. Raises ToolBroken."""
    try:
        return finite(value)
    except UserError:
        raise ToolBroken(f"tool {name}: a reward must be a finite number, got {value!r}") from None


def _parsed(arguments: str) -> Json:
    """The arguments of a call. Raises ToolError."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ToolError(f"the arguments must be a JSON object, not {type(found).__name__}")
    return found


def _text(found: object) -> str:
    """A value as the model reads it: a text as it is, anything else as JSON."""
    if isinstance(found, str):
        return found
    if found is None:
        return ""
    try:
        return to_json(found).decode()
    except PydanticSerializationError:
        return str(found)
