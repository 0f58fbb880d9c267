"""Runs one command that never outlives its parent: `python guard.py [--fd=N …] [--io=N] [--nice] COMMAND…`.

The command inherits each open file of `--fd`. The socket of `--io` is its stdin and stdout; else its stdin is empty.
With `--nice` it leaves the processor to others (NICENESS).

    parent ──stdin──► guard ──► keeper (a session of its own) ──► command (a process group of its own) ──► its children

The parent holds the other end of stdin. When that end closes, the keeper sends SIGTERM to the command, waits, and sends
SIGKILL to everything that is left. The end closes when the parent closes it or dies. The wait lasts as many seconds as
the parent has written to the pipe, else GRACE_S. When the command ends, everything that it started is killed.

Guard and keeper watch each other, because a dying parent may kill its own children first, and the guard is one of them.
When one is killed, the other kills the command and everything that it started. On Linux this includes processes that
left the command's group or session: those whose parent died become children of the keeper, or of the guard.

The exit status is the command's (128 + N after signal N). Only the standard library is used, so the guard starts in
milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

GRACE_S = 5.0
DYING_S = 1.0
"""How long a parent that has killed the guard may still live. After that the guard alone was killed."""
NICENESS = 5
"""The niceness of a command with `--nice`. Where Linux shares the processors among sessions (autogroups), the niceness
of a process counts only within its session. So the session gets this niceness too.
"""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINUX = sys.platform == "linux"


def main(command: list[str]) -> int:
    """Start the keeper and wait for it; if it was killed, kill what it kept. Returns the exit status."""
    fds, io = [], None
    while command[0].startswith("--fd="):
        fds.append(int(command.pop(0).removeprefix("--fd=")))
    if command[0].startswith("--io="):
        io = int(command.pop(0).removeprefix("--io="))
    if nice := command[0] == "--nice":
        del command[0]
    guard_lives, held = os.pipe()
    adopt_orphans()
    keeper = os.fork()
    if not keeper:
        os.close(held)
        os.setsid()
        adopt_orphans()
        if nice:
            _lower_session()
        return _keep(command, guard_lives, fds, io, begin_nicely if nice else die_with_keeper)
    if io is not None:
        os.close(io)  # it ends with the command
    _, status = os.waitpid(keeper, 0)
    _kill_descendants()
    return _exit_status(status)


def _keep(command: list[str], guard_lives: int, fds: list[int], io: int | None, begin: Callable[[], None]) -> int:
    """Run `command` until it ends, stdin closes or the guard dies; then kill everything that it started."""
    child_ended = child_signals()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if io is None else io,
        stdout=io,
        process_group=0,
        preexec_fn=begin,
        pass_fds=fds,
    )
    if io is not None:
        os.close(io)
    child.returncode = keep(child.pid, 0, child_ended, guard_lives)
    return child.returncode


def keep(child: int, parent: int, child_ended: int, guard_lives: int | None = None) -> int:
    """Wait until `child` ends, the descriptor `parent` closes or the guard dies; then kill everything that the child
    started. Returns its exit status.
    """
    watched, grace_s, deadline = {parent, child_ended}, b"", math.inf
    if guard_lives is not None:
        watched.add(guard_lives)
    while (status := _reaped(child)) is None:
        left_s = None if deadline == math.inf else max(deadline - time.monotonic(), 0)
        readable, _, _ = select.select(watched, (), (), left_s)
        if not readable:
            os.kill(child, signal.SIGKILL)
            deadline = math.inf
        for end in readable:
            data = os.read(end, 4096)
            if end == parent and data:
                grace_s += data
            elif end == parent:  # the parent closed the pipe, or died
                os.kill(child, signal.SIGTERM)
                deadline = time.monotonic() + float(grace_s or GRACE_S)
            elif end == guard_lives and parent in watched:
                deadline = time.monotonic() + DYING_S
            if not data:
                watched.remove(end)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _kill_descendants()
    return _exit_status(status)


def child_signals() -> int:
    """A descriptor that becomes readable when a child ends."""
    readable, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return readable


def _reaped(child: int) -> int | None:
    """Reap children that have ended, and return the status of `child`; None while it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            return status
        if not pid:
            return None


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _kill_descendants() -> None:
    """Send SIGKILL to all descendants, and to those that they start meanwhile, until none that we may kill is left."""
    while [pid for pid in _descendants() if _kill(pid)]:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _descendants() -> list[int]:
    """The living descendants of this process; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if LINUX else []:
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split(maxsplit=2)[:2]
                if state not in b"ZX":
                    children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children.get(parent, [])]
        found += parents
    return found


def adopt_orphans() -> None:
    """On Linux: become the parent of descendants whose own parent dies."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_keeper() -> None:
    """On Linux: ask the kernel to kill the command when the keeper dies."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_nicely() -> None:
    """`die_with_keeper`, and leave the processor to others."""
    die_with_keeper()
    os.nice(NICENESS)


def _lower_session() -> None:
    """Set the niceness of this process's session, where sessions have one. Only root may do it as often as it likes:
    others are refused when anybody did so in the last 0.1 s.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write(str(NICENESS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
