"""A model over HTTP whose replies are scripted: what a test says, with any tool calls."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest


class Model:
    """Answers chat completions with the replies that were queued: texts, or lists of (name, arguments) calls."""

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.requests: list[dict[str, Any]] = []
        self.n_tokens = 10
        self._ids = itertools.count()

    def says(self, *replies: Any) -> None:
        self.replies += replies

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        reply = self.replies.pop(0)
        if isinstance(reply, httpx.Response):
            return reply
        message: dict[str, Any] = {"role": "assistant", "content": reply if isinstance(reply, str) else None}
        if not isinstance(reply, str):
            message["tool_calls"] = [
                {
                    "id": f"call_{next(self._ids)}",
                    "type": "function",
                    "function": {"name": name, "arguments": said if isinstance(said, str) else json.dumps(said)},
                }
                for name, said in reply
            ]
        n_tokens = min(self.n_tokens, body.get("max_tokens", self.n_tokens))
        usage = {"prompt_tokens": 1, "completion_tokens": n_tokens, "total_tokens": 1 + n_tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        found = {"id": f"c{len(self.requests)}", "object": "chat.completion", "created": 0, "model": "m"}
        return httpx.Response(200, json=found | {"choices": [choice], "usage": usage})


@contextmanager
def served(model: Model) -> Iterator[str]:
    """The URL of a server that answers with the model, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = model.answer(httpx.Request("POST", "http://model", content=body)).read()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def extra(model: Model) -> AsyncIterator[dict[str, Any]]:
    """What an agent's `run` gets."""
    async with httpx.AsyncClient(transport=httpx.MockTransport(model.answer)) as http:
        yield {"base_url": "http://model/sessions/ses-1/v1", "api_key": "k", "http_client": http, "is_eval": False}


@pytest.fixture
def said(model: Model) -> Callable[[int], list[str]]:
    """The texts of the tool messages of a request."""

    def of_request(number: int) -> list[str]:
        return [one["content"] for one in model.requests[number]["messages"] if one["role"] == "tool"]

    return of_request
