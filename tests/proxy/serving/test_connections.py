"""Connections that are too slow, or send too much before a request begins, are ended; others are not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from agentrl.proxy.serving import connections


class App:
    """Echoes the length of a body; /stream writes until the client is gone, and says so."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        size, pause_s = 65_536, 0.0
        if scope["path"] == "/events":
            scope["endless"] = True
            size, pause_s = 10, 0.01
        if scope["path"] in ("/stream", "/events"):
            leaving = asyncio.create_task(self._left(receive))
            while not leaving.done():
                await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
                await asyncio.sleep(pause_s)
            self.gone.set()
            return
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": str(size).encode()})

    async def _left(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.fixture
def app() -> App:
    return App()


Running = tuple[uvicorn.Server, threading.Thread, int]
"""A server, its thread and its port."""


@pytest.fixture
def running(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(connections, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    config = uvicorn.Config(
        app,
        port=0,
        http=connections.BoundedHttp,
        log_level="warning",
        lifespan="off",
        timeout_keep_alive=connections.KEEP_ALIVE_S,
    )
    server = uvicorn.Server(config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server, thread, listener.getsockname()[1]
    server.should_exit = True
    thread.join(120)


@pytest.fixture
def port(running: Running) -> int:
    return running[2]


def connect(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(20)
    return client


def rest(client: socket.socket) -> bytes:
    said = b""
    try:
        while part := client.recv(65_536):
            said += part
    except ConnectionError:
        pass
    return said


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "])
def test_headers_that_do_not_come_end_the_connection(port: int, begun: bytes) -> None:
    with connect(port) as client:
        client.sendall(begun)
        assert rest(client).startswith(b"HTTP/1.1 408 ")


def test_headers_of_a_second_request_are_awaited_no_longer(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nx-a: ")
        said = rest(client)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in said


def test_headers_without_end_are_refused(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
        try:
            for _ in range(100):
                client.sendall(b"x-a: " + b"a" * 4000 + b"\r\n")
        except ConnectionError:
            return
        assert rest(client).startswith(b"HTTP/1.1 431 ")


def test_a_client_that_does_not_read_is_disconnected(app: App, port: int) -> None:
    with connect(port) as client:
        client.sendall(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert app.gone.wait(120)


def test_ordinary_requests_are_served_on_one_connection(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for body in (b"", b"x" * 1000, b"x" * 1_000_000):
            assert http.post("/", content=body).text == str(len(body))
            time.sleep(0.4)  # longer than headers may take: the connection is between two requests


def test_a_stream_without_an_end_does_not_hold_up_the_stop_of_its_server(running: Running, app: App) -> None:
    server, thread, port = running
    with connect(port) as client:
        client.sendall(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
        server.should_exit = True
        rest(client)  # until the server closes it
    thread.join(120)
    assert not thread.is_alive()
    assert app.gone.wait(20)
