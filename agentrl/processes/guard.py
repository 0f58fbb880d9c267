"""Runs one command that never outlives its parent: `python guard.py COMMAND…`.

The parent holds the other end of the guard's stdin. When that end closes, the guard sends SIGTERM to the command,
waits, and sends SIGKILL to the command and everything it started. The end closes when the parent closes it or dies.
The wait lasts as many seconds as the parent has written to the pipe, else GRACE_S. The exit status is the command's
(128 + N after signal N). The guard uses the standard library only, so it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0
PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Run `command` in a process group of its own until it ends or stdin closes; then kill the group."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_guard)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_group(child.pid)
    return 128 - status if status < 0 else status


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    grace_s = b""
    while part := os.read(0, 4096):  # ends when the parent closes the pipe
        grace_s += part
    child.terminate()
    try:
        child.wait(float(grace_s or GRACE_S))
    except subprocess.TimeoutExpired:
        _kill_group(child.pid)


def _die_with_guard() -> None:
    """On Linux: ask the kernel to kill the command when the guard dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
