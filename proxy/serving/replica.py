"""One process of `agentrl proxy --workers N`, started by prefork.py: `python -m agentrl.proxy.serving.replica JOB`.

The database's URL, the admin key and the engines' keys come from the environment. When the parent dies, in any
way, the socket pair closes, and the worker stops too. A worker ignores Ctrl-C, which a terminal sends to every process:
the parent stops its workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from agentrl.errors import AgentRLError
from agentrl.processes.parent_watch import end_with_parent
from agentrl.proxy.serving.prefork import SERVES, Job
from agentrl.visible import log_to_stderr, say

ORPHAN_S = 3.0
"""How long a worker whose parent has died may finish its running calls."""


class _Server(uvicorn.Server):
    """Notifies the parent when it serves; ignores Ctrl-C."""

    def __init__(self, config: uvicorn.Config, parent: socket.socket) -> None:
        super().__init__(config)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            with contextlib.suppress(OSError):  # the parent is dead: `end_with_parent` stops this process
                self._parent.send(SERVES)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job(**json.loads(sys.argv[1]))
    log_to_stderr(job.log_level, f"worker {job.index} ")
    parent = socket.socket(fileno=job.parent)
    end_with_parent(parent, ORPHAN_S)

    from agentrl.proxy.metrics import counters

    counters.share(job.index)

    from agentrl.engine.engine_keys import EngineKeys
    from agentrl.proxy.app import Settings, create_app
    from agentrl.proxy.serving import connections

    listener = socket.socket(fileno=job.listener)
    settings = Settings(
        database_url=os.environ["AGENTRL_DATABASE_URL"],
        run_name=job.run_name,
        engine_urls=job.engine_urls,
        engine_keys=EngineKeys.from_env(os.environ),
        admin_key=os.environ["AGENTRL_ADMIN_KEY"],
        replica=f"{job.replica}/{job.index}",
        listens=listener.getsockname()[:2],
    )
    try:
        app = create_app(settings)
    except AgentRLError as error:
        say(f"agentrl: {error}", err=True)
        return 2
    connections.keep_what_is_loaded()
    server = _Server(connections.server_config(app, job.log_level), parent)
    server.run(sockets=[listener])
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
