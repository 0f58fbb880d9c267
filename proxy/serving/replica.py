"""One process of `agentrl proxy --workers N`, started by prefork.py: `python -m agentrl.proxy.serving.replica JOB`.

The database's URL, the admin key and the engines' keys come from the environment. When the parent dies in whatever way,
the socket pair closes, and the worker stops too. Ctrl-C in a terminal reaches every process: the parent decides what it
means.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType

import uvicorn

from agentrl.errors import AgentRLError
from agentrl.proxy.serving.prefork import SERVES, Job
from agentrl.visible import log_to_stderr, say

ORPHAN_S = 3.0
"""How long a worker whose parent has died goes on with the calls that run."""


class _Server(uvicorn.Server):
    """Tells the parent when it serves; leaves Ctrl-C to it."""

    def __init__(self, config: uvicorn.Config, parent: socket.socket) -> None:
        super().__init__(config)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            with contextlib.suppress(OSError):  # it is dead: the other thread sees to it
                self._parent.send(SERVES)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job(**json.loads(sys.argv[1]))
    log_to_stderr(job.log_level, f"worker {job.index} ")
    parent = socket.socket(fileno=job.parent)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()

    from agentrl.proxy.metrics import counters

    counters.share(job.index)

    from agentrl.engine.engine_keys import EngineKeys
    from agentrl.proxy.app import Settings, create_app
    from agentrl.proxy.serving import connections

    settings = Settings(
        database_url=os.environ["AGENTRL_DATABASE_URL"],
        run_name=job.run_name,
        engine_urls=job.engine_urls,
        engine_keys=EngineKeys.from_env(os.environ),
        admin_key=os.environ["AGENTRL_ADMIN_KEY"],
        replica=f"{job.replica}/{job.index}",
    )
    try:
        app = create_app(settings)
    except AgentRLError as error:
        say(f"agentrl: {error}", err=True)
        return 2
    connections.keep_what_is_loaded()
    server = _Server(connections.server_config(app, job.log_level), parent)
    server.run(sockets=[socket.socket(fileno=job.listener)])
    return 0 if server.started else 1


def _end_with_parent(parent: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while parent.recv(1):  # it never says anything
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
