"""A real S3 server (moto) in a thread, which can be stopped and started again with what it holds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    """Prints no line for each request."""

    def log_request(self, *args: Any, **kwargs: Any) -> None:
        pass


class S3Server:
    """`requests` are the requests so far, `METHOD /BUCKET/KEY`. `before` is called with each, before its answer."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.requests: list[str] = []
        self.before: Callable[[str], None] = lambda request: None
        self._backend = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        self._server = make_server("127.0.0.1", self.port, self._answer, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """What a client's environment needs."""
        return {
            "AWS_ACCESS_KEY_ID": "AKIATESTKEY",
            "AWS_SECRET_ACCESS_KEY": "not-a-real-secret",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        self.requests.append(request)
        self.before(request)
        return self._backend(environ, start_response)
