"""OpenEnv: episodes on the server of an environment, with its tools or with answers as actions.

    agent: agentrl.environments.open_env:OpenEnv
    agent_args: {url: "http://127.0.0.1:8000"}

    run ══ WebSocket ══► server: reset ─► observation, tools
    model ──tool call──► step {"type": "call_tool", …} ──► observation, reward, done

The server is a program with an environment of its own. Its Python package is not needed here: the messages are those of
its client (`GenericEnvClient`, openenv 0.10).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp

from agentrl.configs.section import plain_address
from agentrl.domain.schemas import Json
from agentrl.environments.game_seat import OutOfRoom, Seat
from agentrl.errors import AgentRLError, UserError
from agentrl.rollout.answering.policy_call import PolicyCall
from agentrl.rollout.answering.task_messages import messages_of
from agentrl.rollout.score import Result, Reward
from agentrl.rollout.tools.tool_limits import ToolLimits
from agentrl.rollout.tools.tool_loop import ToolLoop
from agentrl.rollout.tools.tool_result import (
    OpenTool,
    OpenTools,
    ToolBroken,
    ToolContext,
    ToolError,
    ToolResult,
    schema_of,
)

SOURCE = "openenv"
LONGEST_MESSAGE_BYTES = 16 * 2**20
FULL = "CAPACITY_REACHED"
"""The server's code when it serves as many sessions as it may."""


class OpenEnvError(AgentRLError):
    """The server refused a message, or the connection broke. `code` is the server's."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """A session on a server. `total` is the sum of its rewards; `done` says that the environment ended the episode."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.total, self.done = 0.0, False

    async def reset(self, settings: Mapping[str, Any], wait_s: float) -> Json:
        """Start an episode; returns its observation. A server that is full, or starts, is asked again for `wait_s`."""
        deadline = time.monotonic() + wait_s
        for attempt in itertools.count():
            try:
                self._http = self._http or aiohttp.ClientSession()
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LONGEST_MESSAGE_BYTES)
                return (await self._exchange("reset", dict(settings)))["observation"]  # type: ignore[no-any-return]
            except (aiohttp.ClientError, OpenEnvError) as error:
                await self.close()
                if (isinstance(error, OpenEnvError) and error.code != FULL) or time.monotonic() > deadline:
                    raise OpenEnvError(f"cannot start an episode on {self._url}: {error}") from error
            await asyncio.sleep(min(0.2 * 2**attempt, 3.0))
        raise AssertionError

    async def step(self, action: Json) -> tuple[Json, float | None]:
        """Do an action; returns the observation and its reward."""
        data = await self._exchange("step", action)
        reward = data.get("reward")
        self.total += reward or 0.0
        self.done = bool(data.get("done"))
        return data["observation"], reward

    async def close(self) -> None:
        """End the session."""
        if self._http is not None:
            await self._http.close()
        self._http = self._socket = None

    async def _exchange(self, kind: str, data: Json) -> Json:
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_json({"type": kind, "data": data})
                answer = json.loads(await self._socket.receive_str())
        except TimeoutError:
            raise OpenEnvError(f"no answer to {kind} within {self._timeout_s:g} s") from None
        except (aiohttp.ClientError, TypeError, ValueError) as error:  # TypeError: the connection ended
            raise OpenEnvError(f"the connection broke during {kind}: {error}") from error
        found = answer.get("data") or {}
        if answer.get("type") == "error":
            raise OpenEnvError(f"{found.get('message')} ({found.get('code')})", str(found.get("code")))
        return dict(found)


class ServerTools:
    """The tools of a connected session, as a source of tools."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def open(self, context: ToolContext) -> OpenTools:
        """List the tools."""
        listed, _ = await self._connection.step({"type": "list_tools"})
        tools = [
            OpenTool(
                name=one["name"],
                schema=schema_of(one["name"], one.get("description") or "", one.get("input_schema") or {}),
                call=partial(self._call, one["name"]),
            )
            for one in listed.get("tools") or ()
        ]
        return OpenTools(name=SOURCE, tools=tools)

    async def _call(self, name: str, arguments: Json, _: ToolContext) -> ToolResult:
        if self._connection.done:
            raise ToolError("the episode has ended")
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            observation, reward = await self._connection.step(action)
        except OpenEnvError as error:
            raise ToolBroken(str(error)) from error
        problem = observation.get("error")
        text = str(problem["message"]) if problem else text_of(observation.get("result"))
        return ToolResult(text=text, reward=reward, end=self._connection.done, error=bool(problem))


class OpenEnv:
    """Runs an episode on an OpenEnv server.

    With tools, the conversation starts with the task's prompt, and each reward is that of the model call that called
    the tool. With `action`, the name of a field, each answer is the action `{FIELD: answer}`, and the session has the
    sum of the rewards. The task's `reset` has the arguments of the environment's `reset`.
    """

    def __init__(
        self,
        *,
        url: str,
        action: str | None = None,
        max_turns: int = 20,
        step_timeout_s: float = 60.0,
        wait_s: float = 300.0,
        system: str | None = None,
        template: str | None = None,
        enable_thinking: bool | None = None,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> None:
        try:
            self._url = plain_address(url)
        except ValueError as error:
            raise UserError(f"agent_args.url: {error}") from None
        if max_turns < 1:
            raise UserError(f"agent_args.max_turns: must be at least 1, got {max_turns}")
        self._action, self._max_turns = action, max_turns
        self._step_timeout_s, self._wait_s = step_timeout_s, wait_s
        self._system, self._template = system, template
        self._call = PolicyCall(enable_thinking=enable_thinking, max_tokens=max_tokens, stop=stop)

    async def run(self, data: Json, **extra: Any) -> Result:
        """Run one episode."""
        connection = Connection(self._url, self._step_timeout_s)
        try:
            observation = await connection.reset(data.get("reset") or {}, self._wait_s)
            if self._action is None:
                return await self._with_tools(connection, data, extra)
            return await self._with_answers(self._action, connection, observation, extra)
        finally:
            await connection.close()

    async def _with_tools(self, connection: Connection, data: Json, extra: Json) -> Result:
        messages = messages_of(data, system=self._system, template=self._template)
        limits = ToolLimits(timeout_s=self._step_timeout_s * 2)  # the connection has the smaller one
        source: Sequence[object] = [ServerTools(connection)]
        async with ToolLoop(
            extra, source, task=data, max_turns=self._max_turns, limits=limits, parallel=1, call=self._call
        ) as loop:
            await loop.run(messages)
            result = await loop.result()
        return result if result.rewards else replace(result, rewards=(Reward(value=0.0, source=SOURCE),))

    async def _with_answers(self, field: str, connection: Connection, observation: Json, extra: Json) -> Result:
        seat = Seat(self._call, extra, self._system)
        for _ in range(self._max_turns):
            try:
                answer = await seat.move(text_of(observation))
            except OutOfRoom:
                break
            observation, _ = await connection.step({field: answer})
            if connection.done:
                break
        return Result(rewards=(Reward(value=connection.total, source=SOURCE),), truncated=not connection.done)


def text_of(found: Any) -> str:
    """An observation, or the result of a tool, as text: the parts of an MCP result; else JSON without metadata."""
    if isinstance(found, dict) and isinstance(found.get("content"), list):
        return "\n".join(str(part.get("text", "")) for part in found["content"])
    if isinstance(found, dict):
        shown = {key: value for key, value in found.items() if key != "metadata"}
        only = next(iter(shown.values())) if len(shown) == 1 else shown
        return only if isinstance(only, str) else json.dumps(only)
    return found if isinstance(found, str) else json.dumps(found)
