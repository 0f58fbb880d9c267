"""An aiohttp application served by a thread with an event loop of its own, on 127.0.0.1."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

START_TIMEOUT_S = 10.0


class ServerThread:
    """Serves from `start` to `stop`. The port is chosen by the first start and stays the same."""

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: web.Application) -> None:
        """Serve `app`; returns once the port is open."""
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(app, started), name="fake-engine", daemon=True)
        self._thread.start()
        assert started.wait(START_TIMEOUT_S), "the fake engine did not start"

    def stop(self) -> None:
        """Close every connection at once."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._thread = self._loop = None

    def call(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the server's event loop; returns when it is done."""
        assert self._loop is not None, "the fake engine is not running"
        asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def _serve(self, app: web.Application, started: threading.Event) -> None:
        loop = asyncio.new_event_loop()
        self._loop = loop
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01, access_log=None)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        started.set()
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(runner.cleanup())
        loop.close()
