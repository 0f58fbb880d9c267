"""A hosted process: its requests, its other messages, and each way in which it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.processes import hosted
from agentrl.processes.hosted import HostedProcess, NotStarted, ProcessDied
from agentrl.processes.hosted_set import HostedSet

CHILD = """
import json, os, sys, time
from agentrl.processes.hosted import inherited, line

connection = inherited(sys.argv[1])
lines = connection.makefile("rb")
setup = json.loads(lines.readline())
if setup.get("dies"):
    os._exit(3)
if setup.get("sleeps"):
    time.sleep(600)
connection.sendall(line({"error": setup["refuses"]} if "refuses" in setup else {"ready": ["a"]}))
for text in lines:
    message = json.loads(text)
    if "say" in message:
        connection.sendall(message["say"].encode() + b"\\n")
    if message.get("dies"):
        os._exit(7)
    if "echo" in message:
        connection.sendall(line({"id": message["id"], "echo": message["echo"]}))
"""


class Listener(HostedProcess):
    heard: Any = None

    def received(self, message: dict[str, Any]) -> None:
        self.heard = message["note"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosted_child.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)


async def started(limit_s: float = 60, **setup: Any) -> Listener:
    return await Listener.launch("hosted_child", setup, longest_line=1_000, doing="loading it", limit_s=limit_s)


async def test_replies_reach_their_requests_and_other_messages_the_listener() -> None:
    process = await started()
    assert process.ready == ["a"]
    with process.request({}) as (_, never), process.request({"echo": 1}) as (_, one):
        with process.request({"echo": 2}) as (_, two):
            process.send({"say": '{"note": 5}'})
            assert ((await one)["echo"], (await two)["echo"]) == (1, 2)
            with process.request({"echo": 3}) as (_, three):
                await three
        assert process.heard == 5
        await process.stop("enough")
        with pytest.raises(ProcessDied, match=r"^enough$"):
            await never
    with pytest.raises(ProcessDied, match=r"^enough$"), process.request({}):
        pass


@pytest.mark.parametrize(
    ("setup", "error", "message"),
    [
        ({"refuses": "no such module"}, UserError, "no such module"),
        ({"dies": True}, NotStarted, r"a process died while loading it \(exit status 3\)"),
        ({"sleeps": True, "limit_s": 0.2}, NotStarted, "loading it took longer than 0.2 s"),
    ],
)
async def test_a_process_that_is_not_ready_is_ended(
    setup: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        await started(**setup)


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        ({"dies": True}, r"its process died \(exit status 7\)"),
        ({"say": "[]"}, "its messages cannot be read"),
        ({"say": "{}"}, "its messages cannot be read: 'note'"),
        ({"say": "x" * 2_000}, "its messages cannot be read"),
    ],
)
async def test_requests_without_a_reply_fail_with_the_reason(
    act: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "say" in act:
        monkeypatch.setattr(hosted, "DYING_S", 0.1)  # it does not die, whatever it says
    process = await started()
    with pytest.raises(ProcessDied, match=problem), process.request(act) as (_, reply):
        await reply
    assert process.retiring
    await process.stop()


async def test_a_process_that_retires_is_ended_with_its_last_work() -> None:
    pool: HostedSet[Listener] = HostedSet()
    process = await started()
    pool.add(process)
    process.running, process.retiring = 1, True
    pool.discard_retired()
    assert list(pool) == [process]
    process.running = 0
    pool.discard_retired()
    assert len(pool) == 0
    await pool.stop()
    assert process.died == "its process was ended"


async def test_a_cancelled_wait_leaves_the_process_usable() -> None:
    process = await started()
    with process.request({}) as (_, reply), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await reply
    with process.request({"echo": 1}) as (_, reply):
        assert (await reply)["echo"] == 1
    await process.stop()
