"""Runs one command that never outlives its parent: `python guard.py COMMAND…`.

The parent holds the other end of our stdin. When that closes, because the parent asks or because it died in whatever
way, the command gets SIGTERM, some seconds to comply, then SIGKILL, with everything it started: as many seconds as the
parent has written before, else GRACE_S. The exit status is the command's (128 + N after signal N). Standard library
only: it starts in milliseconds.
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
    """Run `command` in a process group of its own until it ends or our stdin closes; leave nothing of it behind."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_with_guard)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_group(child.pid)
    return 128 - status if status < 0 else status


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    said = b""
    while part := os.read(0, 4096):  # ends when the parent's end is closed
        said += part
    child.terminate()
    try:
        child.wait(float(said or GRACE_S))
    except subprocess.TimeoutExpired:
        _kill_group(child.pid)


def _die_with_guard() -> None:
    """On Linux the kernel kills the command should the guard itself be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
