"""Tools of real MCP servers: what the model sees, where the servers run, and that each of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl import ToolBroken, ToolLoop, UserError
from agentrl.engine.server_process import free_port
from agentrl.rollout.tools.mcp_tools import shared_servers_closed
from agentrl.rollout.tools.tool_entries import sources_of

ASK = [{"role": "user", "content": "go"}]
PROGRAM = str(Path(__file__).parent / "counting_server.py")
COMMAND = [sys.executable, PROGRAM]


def is_gone(pid: str) -> bool:
    """Whether a process ends, within a minute."""
    try:
        psutil.Process(int(pid)).wait(60)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def exists(path: str) -> bool:
    return os.path.exists(path)


async def test_an_episode_has_a_server_of_its_own(
    model: Any, extra: Any, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_RUN_KEY", "secret")
    monkeypatch.setenv("HOST_WORD", "from-worker")
    entry = {"mcp": [*COMMAND, "chatty"], "cwd": "{folder}", "prefix": "c_", "env": {"WORD": "of-{task.name}"}}
    model.says(
        [("c_add", {"n": 2}), ("c_add", {"n": "x"}), ("c_file_here", {}), ("c_fail", {"how": "x"}), ("c_wait", {})],
        [("c_add", {}), ("c_pid", {})],
        "done",
    )
    overrides = {"c_wait": {"timeout_s": 0.2}}
    async with ToolLoop(extra, [entry], task={"name": "task"}, overrides=overrides) as loop:
        await loop.run(ASK)
    added, refused, where, failed, waited, again, pid = said(2)
    assert (added, again) == ("2", "3")
    assert refused.startswith("error: ")
    assert "valid integer" in refused
    folder, word, key = where.split()
    assert (word, key) == ("of-task", "None")
    assert "agentrl-mcp-" in folder
    assert (failed, waited) == ("error: Error executing tool fail: not today", "error: c_wait took longer than 0.2 s")
    assert is_gone(pid)
    assert not exists(folder)
    first = model.requests[0]["tools"][0]["function"]
    assert (first["name"], first["description"].splitlines()[0]) == ("c_add", "Add to the count.")
    assert first["parameters"]["properties"]["n"]["type"] == "integer"


async def test_a_shared_server_serves_all_episodes_and_starts_again(model: Any, extra: Any, said: Any) -> None:
    sources = sources_of([{"mcp": COMMAND, "shared": True, "only": ["add", "pid", "fail"]}])

    async def episode(*calls: Any) -> list[str]:
        model.requests.clear()
        model.says(*calls, "done")
        async with ToolLoop(extra, sources) as loop:
            await loop.run(ASK)
        return said(-1)

    async with shared_servers_closed():
        first = await episode([("add", {}), ("pid", {})])
        second = await episode([("add", {}), ("pid", {})])
        assert (first[0], second[0], first[1]) == ("1", "2", second[1])
        assert [one["function"]["name"] for one in model.requests[0]["tools"]] == ["add", "pid", "fail"]
        with pytest.raises(ToolBroken, match="mcp server mcp ended during a call of fail"):
            await episode([("fail", {"how": "die"})])
        model.replies.clear()
        with pytest.raises(UserError, match="mcp server mcp has no tool 'ad'; did you mean 'add'"):
            async with ToolLoop(extra, [{"mcp": COMMAND, "only": ["ad"]}]):
                pass
        third = await episode([("add", {}), ("pid", {})])
        assert third[0] == "1"
        assert third[1] != first[1]
    assert is_gone(first[1])
    assert is_gone(third[1])


@pytest.mark.long
async def test_a_cancelled_episode_ends_its_server(model: Any, extra: Any) -> None:
    model.says([("pid", {})], [("wait", {})])
    pids: list[str] = []

    async def episode() -> None:
        async with ToolLoop(extra, [{"mcp": COMMAND}], max_turns=1) as loop:
            await loop.run(ASK)
            pids.append(loop.messages[-1]["content"])
            await asyncio.Event().wait()

    task = asyncio.create_task(episode())
    while not pids:
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_gone(pids[0])


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ({"mcp": [*COMMAND, "dies"]}, ToolBroken, "mcp server mcp did not start: .*no such database"),
        ({"mcp": [*COMMAND, "mute"], "start_timeout_s": 1}, ToolBroken, r"mcp server mcp did not start in 1 s"),
        ({"mcp": [*COMMAND, "{task.db}"]}, UserError, "the task has no field 'db'"),
        ({"mcp": COMMAND, "env_from": ["NO_SUCH"]}, UserError, "the variable NO_SUCH is not set"),
        ({"mcp": "http://127.0.0.1:9/mcp"}, ToolBroken, "mcp server mcp did not start: "),
        ({"mcp": ["/no/such/program"]}, UserError, r"tools\[0\]: cannot run '/no/such/program'"),
        ({"mcp": COMMAND, "share": True}, UserError, r"tools\[0\]: unknown 'share'; did you mean 'shared'"),
        ({"mcp": ["a", "{folder}"], "shared": True}, UserError, "a shared server has no {folder}"),
        ({"mcp": COMMAND, "headers": {"a": "b"}}, UserError, "`headers` and `headers_env` are for URLs"),
        ({"mcp": "https://a:b@c/mcp"}, UserError, "must not contain a password"),
        ({"mcp": "https://c/mcp", "cwd": "/"}, UserError, "are for commands"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named(
    extra: Any, entry: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        async with ToolLoop(extra, [entry]):
            raise AssertionError("it was opened")


@pytest.fixture(scope="module")
def http_server() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        while "Uvicorn running" not in process.stderr.readline():
            assert process.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_server_over_http(
    model: Any, extra: Any, said: Any, http_server: str, monkeypatch: Any, shared: bool
) -> None:
    monkeypatch.setenv("SERVER_KEY", "Bearer x")
    entry = {"mcp": http_server, "headers_env": {"Authorization": "SERVER_KEY"}, "shared": shared}
    model.says([("add", {"n": 0}), ("fail", {"how": "x"})], "done")
    async with shared_servers_closed(), ToolLoop(extra, [entry]) as loop:
        await loop.run(ASK)
    assert said(1)[0].isdecimal()
    assert said(1)[1] == "error: Error executing tool fail: not today"


@pytest.mark.long
def test_a_killed_worker_leaves_no_server(tmp_path: Path) -> None:
    program = f"""
        import asyncio
        from agentrl.rollout.tools.tool_entries import sources_of
        from agentrl.rollout.tools.tool_result import ToolContext

        async def main():
            context = ToolContext(task={{}}, extra={{}}, episode_id="e")
            for shared in (False, True):
                (source,) = sources_of([dict(mcp={COMMAND!r}, shared=shared)])
                opened = await source.open(context)
                (pid,) = [one for one in opened.tools if one.name == "pid"]
                print((await pid.call({{}}, context)).text, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [worker.stdout.readline().strip() for _ in range(2)]
    everything = psutil.Process(worker.pid).children(recursive=True)
    assert {int(pid) for pid in pids} <= {one.pid for one in everything}
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait(60)
    worker.stdout.close()
    assert psutil.wait_procs(everything, timeout=60)[1] == []
