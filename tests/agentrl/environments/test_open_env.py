"""OpenEnv's messages over a real WebSocket: tools, answers as actions, refusals, broken connections, full servers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agentrl.environments.open_env import Connection, OpenEnv, OpenEnvError, ServerTools, text_of
from agentrl.errors import UserError
from agentrl.rollout.tools.tool_result import ToolBroken, ToolContext, ToolError

CONTEXT = ToolContext(task={}, extra={}, episode_id="s")


class Server:
    """Answers as it is told to, in turn; `None` ends the connection."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.got: list[Any] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            self.got.append(json.loads(message.data))
            answer = self.answers.pop(0)
            if answer is None:
                break
            await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return socket

    def will_say(self, *observations: Any, reward: float | None = None, done: bool = False) -> None:
        for found in observations:
            data = {"observation": found, "reward": reward, "done": done}
            self.answers.append({"type": "observation", "data": data})

    def will_refuse(self, code: str) -> None:
        self.answers.append({"type": "error", "data": {"message": "no", "code": code}})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_get("/ws", made.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def connection(server: Server) -> AsyncIterator[Connection]:
    made = Connection(server.url, 30)
    server.will_say({"metadata": {}})
    await made.reset({"seed": 3}, 30)
    yield made
    await made.close()


async def test_tools_are_listed_called_and_rewarded(server: Server, connection: Connection) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    server.will_say({"tools": [{"name": "turn", "description": "Turn.", "input_schema": schema}]})
    (tool,) = (await ServerTools(connection).open(CONTEXT)).tools
    assert tool.schema["function"] == {"name": "turn", "description": "Turn.", "parameters": schema}
    server.will_say({"result": {"content": [{"type": "text", "text": "lower"}]}, "error": None}, reward=-0.5)
    server.will_say({"result": None, "error": {"message": "not a number"}}, reward=2.0, done=True)
    first, second = [await tool.call({"n": n}, CONTEXT) for n in (7, 8)]
    assert (first.text, first.reward, first.end, first.error) == ("lower", -0.5, False, False)
    assert (second.text, second.reward, second.end, second.error) == ("not a number", 2.0, True, True)
    assert (connection.total, connection.done) == (1.5, True)
    assert server.got[0] == {"type": "reset", "data": {"seed": 3}}
    assert server.got[-1]["data"] == {"type": "call_tool", "tool_name": "turn", "arguments": {"n": 8}}
    with pytest.raises(ToolError, match="the episode has ended"):
        await tool.call({"n": 9}, CONTEXT)


@pytest.mark.parametrize("answer", [None, "no JSON", {"type": "error", "data": {"message": "no", "code": "X"}}])
async def test_a_server_that_breaks_fails_the_episode(server: Server, connection: Connection, answer: Any) -> None:
    server.will_say({"tools": [{"name": "turn"}]})
    (tool,) = (await ServerTools(connection).open(CONTEXT)).tools
    server.answers.append(answer)
    with pytest.raises(ToolBroken, match=r"no \(X\)|the connection broke during step"):
        await tool.call({}, CONTEXT)


async def test_a_full_server_is_asked_again_and_another_refusal_is_not(server: Server) -> None:
    made = Connection(server.url, 30)
    server.will_refuse("CAPACITY_REACHED")
    server.will_say({"text": "go"})
    assert await made.reset({}, 60) == {"text": "go"}
    await made.close()
    server.will_refuse("FACTORY_ERROR")
    with pytest.raises(OpenEnvError, match=r"cannot start an episode on http://.*: no \(FACTORY_ERROR\)"):
        await made.reset({}, 60)
    server.will_refuse("CAPACITY_REACHED")
    with pytest.raises(OpenEnvError, match=r"no \(CAPACITY_REACHED\)"):
        await made.reset({}, 0)


async def test_an_absent_server_is_an_error_after_the_wait() -> None:
    with pytest.raises(OpenEnvError, match=r"cannot start an episode on http://127\.0\.0\.1:1: "):
        await Connection("http://127.0.0.1:1", 30).reset({}, 0)


async def test_answers_are_actions_until_the_end(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["left", "right", "never"])

    async def call(self: Any, messages: list[Any], extra: Any) -> Any:
        shown.append(messages[-1]["content"])
        text = next(said)
        message = SimpleNamespace(content=text, model_dump=lambda **_: {"role": "assistant", "content": text})
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    shown: list[str] = []
    monkeypatch.setattr("agentrl.rollout.answering.policy_call.PolicyCall.__call__", call)
    server.will_say({"text": "start", "metadata": {}})
    server.will_say({"board": [1], "score": 2}, reward=0.25)
    server.will_say({"text": "end"}, reward=0.5, done=True)
    result = await OpenEnv(url=server.url, action="move").run({"reset": {"seed": 1}})
    assert [(one.value, one.source) for one in result.rewards] == [(0.75, "openenv")]
    assert not result.truncated
    assert shown == ["start", '{"board": [1], "score": 2}']
    assert [one["data"] for one in server.got] == [{"seed": 1}, {"move": "left"}, {"move": "right"}]
    server.will_say({"text": "start"})
    server.will_say({"text": "on"}, reward=0.25)
    said = iter(["left"])
    assert (await OpenEnv(url=server.url, action="move", max_turns=1).run({})).truncated


def test_results_are_texts() -> None:
    assert text_of({"content": [{"text": "a"}, {"text": "b"}]}) == "a\nb"
    assert text_of({"metadata": {}, "text": "x"}) == "x"
    assert text_of({"a": 1, "b": "x"}) == '{"a": 1, "b": "x"}'
    assert text_of(None) == "null"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"url": "ftp://h"}, "agent_args.url: must be http"),
        ({"url": "http://h", "max_turns": 0}, "max_turns: must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OpenEnv(**args)
