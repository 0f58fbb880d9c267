"""Ends a process of ours when its parent dies.

`guard` does the same for a command that is not ours, from a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time


def end_with_parent(parent: socket.socket, grace_s: float) -> None:
    """Send this process SIGTERM once the other end of `parent` is closed, and end it after `grace_s`."""
    threading.Thread(target=_wait_and_end, args=(parent, grace_s), daemon=True).start()


def _wait_and_end(parent: socket.socket, grace_s: float) -> None:
    with contextlib.suppress(OSError):
        while parent.recv(1):  # the parent sends nothing: this returns when it is gone
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)
