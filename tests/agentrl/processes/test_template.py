"""Processes that are forked from a template: their answers, their ends, and when they are started by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.processes import guard
from agentrl.processes.hosted import HostedProcess, NotStarted, ProcessDied
from agentrl.processes.template import Template

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux only")
HOST = """
import asyncio, json, os, random, subprocess, sys, threading, time
import numpy
from agentrl.errors import UserError
from agentrl.processes.hosted import inherited, line

loaded_by = None

def preload(setup):
    global loaded_by
    loaded_by = os.getpid()
    if setup.get("refuses"):
        raise UserError(setup["refuses"])
    if setup.get("thread"):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    if setup.get("dies"):
        os._exit(9)

async def main(connected):
    reader, writer = await asyncio.open_unix_connection(sock=inherited(connected))
    setup = json.loads(await reader.readline())
    if setup.get("dies_later"):
        os._exit(4)
    drawn = [float(numpy.random.rand()), random.random()]
    writer.write(line({"ready": {"pid": os.getpid(), "loaded_by": loaded_by, "drawn": drawn}}))
    while text := await reader.readline():
        message = json.loads(text)
        match message["do"]:
            case "exit":
                os._exit(7)
            case "raise":
                raise ValueError("no luck")
            case "leave":
                child = subprocess.Popen(["sleep", "600"], start_new_session=True)
                writer.write(line({"id": message["id"], "pid": child.pid}))

if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
"""

PARENT = """
import asyncio
from agentrl.processes.hosted import HostedProcess
from agentrl.processes.template import Template

async def main():
    template = await Template.start("forked_host", {})
    about = {"longest_line": 1000, "doing": "loading it", "limit_s": 60}
    process = await HostedProcess.launch("forked_host", {}, template=template, **about)
    print(process.ready["pid"], process.ready["loaded_by"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forked_host.py").write_text(HOST)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
async def template() -> AsyncIterator[Template]:
    made = await Template.start("forked_host", {})
    assert made is not None
    yield made
    await made.stop()


async def forked(template: Template | None, **setup: Any) -> HostedProcess:
    return await HostedProcess.launch(
        "forked_host", setup, longest_line=1_000, doing="loading it", limit_s=60, template=template
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - it is about another process
            await asyncio.sleep(0.01)


async def test_children_share_what_their_template_has_imported_and_draw_other_numbers(template: Template) -> None:
    one, two = await forked(template), await forked(template)
    assert one.ready["loaded_by"] == two.ready["loaded_by"] not in (one.ready["pid"], two.ready["pid"], os.getpid())
    assert len({*one.ready["drawn"], *two.ready["drawn"]}) == 4
    await one.stop()
    await two.stop()
    assert not psutil.pid_exists(one.ready["pid"])
    assert not psutil.pid_exists(two.ready["pid"])


async def test_the_priorities_of_children_count_among_all_children(template: Template) -> None:
    """A session of its own would get as much of the processors as all other children together."""
    one, two = await forked(template), await forked(template)
    assert os.getsid(one.ready["pid"]) == os.getsid(two.ready["pid"]) != os.getsid(0)
    assert os.getpriority(os.PRIO_PROCESS, one.ready["pid"]) == os.nice(0) + guard.NICENESS
    await one.stop()
    await two.stop()


@pytest.mark.parametrize(("do", "how"), [("exit", "exit status 7"), ("raise", "exit status 1")])
async def test_the_end_of_a_child_has_its_exit_status(template: Template, do: str, how: str) -> None:
    process = await forked(template)
    with pytest.raises(ProcessDied, match=how), process.request({"do": do}) as (_, reply):
        await reply
    await process.stop()


async def test_a_signal_is_told(template: Template) -> None:
    process = await forked(template)
    with process.request({"do": "nothing"}) as (_, reply):
        os.kill(process.ready["pid"], signal.SIGSEGV)
        with pytest.raises(ProcessDied, match="signal 11"):
            await reply
    await process.stop()


async def test_a_child_that_dies_before_it_is_ready_is_an_error(template: Template) -> None:
    with pytest.raises(NotStarted, match=r"died while loading it \(exit status 4\)"):
        await forked(template, dies_later=True)


@pytest.mark.parametrize("how", ["stop", pytest.param("kill", marks=pytest.mark.long), "kill the keeper"])
async def test_what_a_child_has_started_ends_with_it(template: Template, how: str) -> None:
    process = await forked(template)
    with process.request({"do": "leave"}) as (_, reply):
        left = (await reply)["pid"]
    if how == "stop":
        await process.stop()
    elif how == "kill":
        os.kill(process.ready["pid"], signal.SIGKILL)
    else:
        os.kill(psutil.Process(process.ready["pid"]).ppid(), signal.SIGKILL)
        await until(lambda: not psutil.pid_exists(process.ready["pid"]))
        await template.stop()  # what was left then ends with the template at the latest
    await until(lambda: not psutil.pid_exists(left))
    await process.stop()


async def test_children_and_template_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    parent = await asyncio.create_subprocess_exec(sys.executable, "parent.py", stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(word) for word in (await parent.stdout.readline()).split()]
    assert len(pids) == 2
    parent.kill()
    await parent.wait()
    await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


async def test_children_are_started_by_themselves_after_the_death_of_their_template(template: Template) -> None:
    process = await forked(template)
    os.kill(process.ready["loaded_by"], signal.SIGKILL)
    await until(lambda: template.died)
    await until(lambda: not psutil.pid_exists(process.ready["pid"]))
    alone = await forked(template)
    assert alone.ready["loaded_by"] is None
    await alone.stop()
    await process.stop()


@pytest.mark.parametrize("setup", [{"refuses": "no agent"}, {"thread": True}, {"dies": True}])
async def test_what_cannot_be_forked_has_no_template(setup: dict[str, Any]) -> None:
    assert await Template.start("forked_host", setup) is None
