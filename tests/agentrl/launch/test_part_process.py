"""A part is restarted when it dies, given up when it keeps dying, and never outlives whoever started it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from liveness import is_alive

from agentrl.errors import UserError
from agentrl.launch import part_process
from agentrl.launch.part_process import Part, PartFailed, keep_running
from agentrl.processes import restarts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(restarts, "BACKOFF_MAX_S", 0.01)


def python(tmp_path: Path, code: str, *, done: bool = True) -> Part:
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    return Part(name="part", argv=argv, env={"HERE": str(tmp_path)}, log_file=tmp_path / "part.log", done=lambda: done)


def heard() -> tuple[list[int], Callable[[int], Awaitable[None]]]:
    """A list, and a callback that fills it."""
    numbers: list[int] = []

    async def note(number: int) -> None:
        numbers.append(number)

    return numbers, note


def wait_for_pids(path: Path) -> list[int]:
    while not path.exists() or len(path.read_text().split()) < 2:
        time.sleep(0.01)
    return [int(pid) for pid in path.read_text().split()]


async def test_a_part_that_dies_is_restarted_until_it_is_done(tmp_path: Path) -> None:
    code = """
        import os, pathlib, signal
        runs = pathlib.Path(os.environ["HERE"], "runs")
        n = len(runs.read_text()) if runs.exists() else 0
        runs.write_text("x" * (n + 1))
        if n == 0: os.kill(os.getpid(), signal.SIGKILL)
        if n == 1: raise SystemExit(7)
    """
    deaths, note = heard()
    await keep_running(python(tmp_path, code), max_restarts=2, on_death=note)
    assert deaths == [128 + signal.SIGKILL, 7]


@pytest.mark.parametrize("max_restarts", [0, 3])
async def test_a_part_must_not_end_before_its_work_is_done(tmp_path: Path, max_restarts: int) -> None:
    deaths, note = heard()
    part = python(tmp_path, "print('hello')", done=False)
    with pytest.raises(PartFailed, match=f"part died {max_restarts + 1} times, last with status 0: hello"):
        await keep_running(part, max_restarts=max_restarts, on_death=note)
    assert deaths == [0] * max_restarts


async def test_a_wrong_setting_is_not_tried_again(tmp_path: Path) -> None:
    code = "import sys; print('agentrl: no such thing', file=sys.stderr); sys.exit(2)"
    deaths, note = heard()
    with pytest.raises(UserError, match=r"^no such thing$"):
        await keep_running(python(tmp_path, code), max_restarts=5, on_death=note)
    assert deaths == []


async def test_only_quick_deaths_in_a_row_are_spaced_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def run_once(_: Part, __: object) -> int:
        lived_s = [1.0, 1.0, restarts.LIVED_S, 1.0, 1.0][len(pauses)]
        clock.append(clock[-1] + lived_s)
        return 1

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    clock = [0.0]
    monkeypatch.setattr(restarts, "BACKOFF_FIRST_S", 0.5)
    monkeypatch.setattr(restarts, "BACKOFF_MAX_S", 10.0)
    monkeypatch.setattr(part_process, "_run_once", run_once)
    monkeypatch.setattr(part_process, "time", SimpleNamespace(monotonic=lambda: clock[-1]))
    monkeypatch.setattr(part_process.asyncio, "sleep", sleep)
    part = python(tmp_path, "")
    part.log_file.touch()
    with pytest.raises(PartFailed):
        await keep_running(part, max_restarts=4)
    assert pauses == [0.5, 1.0, 0.0, 0.5]


SPAWNS = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path(os.environ["HERE"], "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


async def test_cancelling_ends_a_part_and_what_it_started(tmp_path: Path) -> None:
    task = asyncio.create_task(keep_running(python(tmp_path, SPAWNS), max_restarts=5))
    pids = await asyncio.to_thread(wait_for_pids, tmp_path / "pids")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_gone, pids)


SAVES = """
    import os, pathlib, signal, time
    here = pathlib.Path(os.environ["HERE"])
    def save(*_):
        print("saving", flush=True)
        time.sleep(float(os.environ["SAVES_FOR_S"]))
        (here / "saved").touch()
        raise SystemExit
    signal.signal(signal.SIGTERM, save)
    print("started", flush=True)
    (here / "pids").write_text(f"{os.getpid()} {os.getpid()}")
    time.sleep(600)
"""


@pytest.mark.parametrize(("grace_s", "saves_for_s", "saved"), [(0.1, 600.0, False), (120.0, 0.2, True)])
async def test_a_part_has_its_time_to_save_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float, saves_for_s: float, saved: bool
) -> None:
    monkeypatch.setenv("SAVES_FOR_S", str(saves_for_s))
    task = asyncio.create_task(keep_running(replace(python(tmp_path, SAVES), grace_s=grace_s), max_restarts=5))
    pids = await asyncio.to_thread(wait_for_pids, tmp_path / "pids")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_gone, pids)
    assert (tmp_path / "saved").exists() == saved, (tmp_path / "part.log").read_text()


def test_a_part_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    supervisor = textwrap.dedent(f"""
        import asyncio, pathlib, sys
        from agentrl.launch.part_process import Part, keep_running
        part = Part(name="part", argv=[sys.executable, "-c", {textwrap.dedent(SPAWNS)!r}],
                    env={{"HERE": {str(tmp_path)!r}}}, log_file=pathlib.Path({str(tmp_path)!r}, "log"))
        asyncio.run(keep_running(part, max_restarts=5))
    """)
    parent = subprocess.Popen([sys.executable, "-c", supervisor])
    pids = wait_for_pids(tmp_path / "pids")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(pids)


def wait_until_gone(pids: list[int]) -> None:
    """A killed process is there for a moment longer; one that was not killed hits the test's time limit."""
    while any(is_alive(pid) for pid in pids):
        time.sleep(0.02)
