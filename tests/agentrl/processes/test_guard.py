"""Real processes: a guarded command whose children left its group and its session, and who is killed first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.processes import children, guard

INHERITS = "import os, sys; os.write(int(sys.argv[1]), b'x'); sys.exit(os.path.exists(f'/proc/self/fd/{sys.argv[2]}'))"
TELLS_NICENESS = """
import contextlib, os, sys
session = ""
with contextlib.suppress(OSError), open("/proc/self/autogroup") as file:
    session = file.read()
os.write(int(sys.argv[1]), f"{os.nice(0)} {session}".encode())
"""
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
FAMILY = f"""
import os, signal, subprocess, sys, time

def sleeper():
    return subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True).pid

def terminated(number, frame):
    open(sys.argv[1] + ".terminated", "w").close()
    sys.exit(7)

ours, orphans = sleeper(), os.pipe()
if not (daemon := os.fork()):  # its child becomes an orphan
    os.setsid()
    os.write(orphans[1], str(sleeper()).encode())
    os._exit(0)
os.waitpid(daemon, 0)
signal.signal(signal.SIGTERM, terminated)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{ours}} {{os.read(orphans[0], 100).decode()}}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""
"""Starts a child and an orphan, each in a session of its own, and writes all process ids. SIGTERM: status 7."""
GUARDED = [sys.executable, "-I", "-S", guard.__file__]


class Family:
    """A guard, its keeper, the command and its two children."""

    def __init__(self, process: subprocess.Popen[bytes], pids: Path) -> None:
        self.process = process
        self.guard = psutil.Process(process.pid)
        (self.keeper,) = self.guard.children()
        self.members = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        self.terminated = Path(f"{pids}.terminated")

    def gone(self) -> bool:
        """Wait until no member is left."""
        return psutil.wait_procs([*self.members, self.keeper], timeout=120)[1] == []


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Callable[..., Family]]:
    started: list[Family] = []

    def start(lives_s: float = 600) -> Family:
        pids = tmp_path / "pids"
        command = [sys.executable, "-c", FAMILY, str(pids), str(lives_s)]
        process = subprocess.Popen([*GUARDED, *command], stdin=subprocess.PIPE, start_new_session=True)
        wait_for(pids)
        started.append(Family(process, pids))
        return started[-1]

    yield start
    for found in started:
        for process in (found.guard, found.keeper, *found.members):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        found.process.stdin.close()
        found.process.wait(120)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def test_the_exit_status_is_the_commands() -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with subprocess.Popen([*GUARDED, *command], stdin=subprocess.PIPE) as process:
        assert process.wait(120) == 128 + signal.SIGKILL


def test_a_closed_pipe_terminates_the_command_and_kills_what_it_started(family: Callable[..., Family]) -> None:
    ours = family()
    ours.process.stdin.close()
    assert ours.process.wait(120) == 7
    assert ours.terminated.exists()
    assert ours.gone()


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace_that_was_written(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = SLEEPER.replace("time.sleep", f"open({str(ready)!r}, 'w').close(); time.sleep")
    with subprocess.Popen([*GUARDED, sys.executable, "-c", stubborn], stdin=subprocess.PIPE) as process:
        wait_for(ready)
        process.communicate(b"0.1", timeout=120)
        assert process.returncode == 128 + signal.SIGKILL


def test_processes_that_a_command_leaves_are_killed_when_it_ends(family: Callable[..., Family]) -> None:
    ours = family(lives_s=0.5)
    assert ours.process.wait(120) == 0
    assert ours.gone()


def test_everything_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [*GUARDED, sys.executable, "-c", FAMILY, str(pids), "600"]
    script = (
        "import subprocess, time\n"
        f"print(subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        processes = [psutil.Process(int(parent.stdout.readline()))]
        wait_for(pids)
        processes += processes[0].children(recursive=True)
        processes += [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        parent.kill()
    assert psutil.wait_procs(processes, timeout=120)[1] == []
    assert Path(f"{pids}.terminated").exists()


def test_a_killed_guard_leaves_nothing_while_its_parent_lives(family: Callable[..., Family]) -> None:
    ours = family()
    ours.guard.kill()
    assert ours.process.wait(120) == -signal.SIGKILL
    assert ours.gone()
    assert not ours.terminated.exists()


def test_the_command_is_terminated_when_its_parent_kills_the_guard_first(family: Callable[..., Family]) -> None:
    """A Ray worker that exits kills its children, then ends itself."""
    ours = family()
    ours.guard.kill()
    ours.process.stdin.close()
    assert ours.gone()
    assert ours.terminated.exists()


def test_a_killed_keeper_leaves_nothing(family: Callable[..., Family]) -> None:
    ours = family()
    ours.keeper.kill()
    assert ours.process.wait(120) == 128 + signal.SIGKILL
    assert ours.gone()


def test_a_command_that_cannot_start_is_a_failure() -> None:
    with subprocess.Popen([*GUARDED, "/nowhere"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.wait(120) == 1
        assert b"/nowhere" in process.stderr.read()


async def test_a_command_inherits_the_files_that_are_passed_and_no_others() -> None:
    readable, passed = os.pipe()
    other = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(other, True)
    command = [sys.executable, "-c", INHERITS, str(passed), str(other)]
    process = await children.start(command, env=os.environ, stdout=None, stderr=None, pass_fds=[passed])
    os.close(passed)
    assert await process.wait() == 0
    assert os.read(readable, 10) == b"x"
    os.close(readable)
    os.close(other)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sessions with a niceness")
@pytest.mark.parametrize("nice", [False, True])
async def test_a_nice_command_leaves_the_processor_to_other_sessions(nice: bool) -> None:
    readable, passed = os.pipe()
    command = [sys.executable, "-c", TELLS_NICENESS, str(passed)]
    process = await children.start(command, env=os.environ, stdout=None, stderr=None, pass_fds=[passed], nice=nice)
    os.close(passed)
    assert await process.wait() == 0
    niceness, session = os.read(readable, 100).decode().split(" ", 1)
    os.close(readable)
    assert int(niceness) == os.nice(0) + nice * guard.NICENESS
    if session:  # "/autogroup-N nice N"
        assert int(session.split()[-1]) == nice * guard.NICENESS


async def test_a_command_talks_through_a_socket_that_ends_with_it() -> None:
    ours, its = socket.socketpair()
    process = await children.start(["cat"], env=os.environ, stdout=None, stderr=None, io=its.fileno())
    its.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(b"one\n")
    assert await reader.readline() == b"one\n"
    (keeper,) = psutil.Process(process.pid).children()
    (command,) = keeper.children()
    command.kill()
    assert await reader.read() == b""
    assert await process.wait() == 128 + signal.SIGKILL
    writer.close()
