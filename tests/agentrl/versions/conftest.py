"""A host that serves version files over HTTP and can break connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from agentrl.versions.version_files import Shelf, VersionFiles, WeightsFolder

TOKEN = "reads"


class Host:
    """Serves version files at `url`. `break_after`: bytes after which a connection is cut.

    `requests` are the paths and ranges so far; `answer` replaces the answers of `files`.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.requests: list[tuple[str, str]] = []
        self.break_after: Callable[[str], int | None] = lambda path: None
        self.answer: Callable[[Any, Any, Any], Any] | None = None
        self.files = VersionFiles([shelf], lambda token, name: token == TOKEN)
        self._server = uvicorn.Server(uvicorn.Config(self, port=0, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/versions"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self.requests.append((scope["path"], headers.get(b"range", b"").decode()))
        left = self.break_after(scope["path"])

        async def cut(message: Any) -> None:
            nonlocal left
            if left is not None and message["type"] == "http.response.body":
                await send(message | {"body": message["body"][:left]})
                left -= len(message["body"])
                if left <= 0:
                    raise ConnectionAbortedError
            else:
                await send(message)

        await (self.answer or self.files)(scope, receive, cut)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    served = Host(WeightsFolder(tmp_path / "served"))
    yield served
    served.stop()
