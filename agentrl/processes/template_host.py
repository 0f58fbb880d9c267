"""A process that other processes are forked from: `python -m agentrl.processes.template_host N`, N an open socket.

    parent ══ {"host", "setup"} ══► template ══ {"ready": true or false} ══► parent
    parent ══ a byte and two open sockets ══► template ──fork──► keeper ──fork──► host

`host` is a module with `preload(setup)`, which imports what takes long, and `async def main(socket)`. The template runs
nothing after that: it forks, so that each host starts in milliseconds and shares the memory of the imports. The keeper
does for its host what a guard does (guard.py), and sends the exit status over the second socket.

It is not ready, and its parent starts each host by itself, if the imports have started threads or opened a GPU: neither
survives a fork.

All hosts stay in the session of the template. Where Linux shares the processors among sessions (autogroups), they have
one share together, within which the priority of each counts. So the session need not be nice (guard.py), but hosts are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.processes import guard


def main(connected: str) -> None:
    """Import, then fork a host for each request until the connection ends."""
    connection = socket.socket(fileno=int(connected))
    connection.set_inheritable(False)
    with connection.makefile("rb") as lines:
        asked = json.loads(lines.readline())
    host = importlib.import_module(asked["host"])
    try:
        host.preload(asked["setup"])
    except AgentRLError:  # a host says what is wrong
        forkable = False
    else:
        forkable = _forkable()
    connection.sendall(json.dumps({"ready": forkable}).encode() + b"\n")
    gc.collect()
    gc.freeze()  # else the collections of each host would copy the pages of all that is imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps the keepers
    while True:
        asked_for, fds, _, _ = socket.recv_fds(connection, 1, 2)
        if not asked_for:
            return
        if not os.fork():
            connection.close()
            _keep(host, *fds)
        for fd in fds:
            os.close(fd)


def _forkable() -> bool:
    """Whether a fork of this process works as a process of its own would."""
    torch: Any = sys.modules.get("torch")
    return threading.active_count() == 1 and not (torch is not None and torch.cuda.is_initialized())


def _keep(host: ModuleType, connection: int, parent: int) -> None:
    """Fork the host, wait for its end or for that of the parent, and exit."""
    os.setpgid(0, 0)
    guard.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child_ended = guard.child_signals()
    child = os.fork()
    if not child:
        os.close(parent)
        _run(host, connection)
    os.close(connection)
    status = guard.keep(child, parent, child_ended)
    with contextlib.suppress(ConnectionError):  # the parent has died
        os.write(parent, str(status).encode())
    os._exit(0)


def _run(host: ModuleType, connection: int) -> None:
    """Be the host, and exit."""
    guard.begin_nicely()
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # else all hosts would draw the same numbers; `random` does this by itself
    status = 0
    try:
        asyncio.run(host.main(str(connection)))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process, which must not go on as its template
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
