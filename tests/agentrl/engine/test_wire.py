"""The connections that samplings go over: kept while they can be, never used when they cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from agentrl.engine import wire
from agentrl.engine.wire import Wire

OK = b"HTTP/1.1 200 OK\r\n"
TWO_CHUNKS = OK + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
TIMEOUT_S = 30.0


@dataclass
class Server:
    """Answers every request with the same bytes, and says what it saw."""

    answer: bytes
    hangs_up: bool = False
    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    left: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
                self.requests.append(head + await reader.readexactly(int(length.split(b":")[1])))
                writer.write(self.answer)
                if self.hangs_up:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left += 1
        writer.close()


@asynccontextmanager
async def serving(answer: bytes, *, hangs_up: bool = False) -> AsyncIterator[Server]:
    server = Server(answer, hangs_up)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    yield server
    listening.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not true():  # noqa: ASYNC110 - what it waits for tells nobody
            await asyncio.sleep(0.01)


async def ask(line: Wire, path: str = "/x", timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    answer = await line.post(path, b"{}", {"X-One": "1"}, timeout_s)
    try:
        return answer.status, await answer.rest()
    finally:
        line.release(answer)


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with serving(TWO_CHUNKS) as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        assert [await ask(line) for _ in range(3)] == [(200, b"abcde")] * 3
        assert server.connections == 1
        line.close()
        await until(lambda: server.left == 1)


async def test_requests_side_by_side_have_connections_of_their_own() -> None:
    async with serving(OK + b"content-length: 2\r\n\r\nok") as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        assert await asyncio.gather(*(ask(line) for _ in range(3))) == [(200, b"ok")] * 3
        assert server.connections == 3
        line.close()


@pytest.mark.parametrize(
    ("head", "hangs_up"),
    [(b"connection: close\r\ncontent-length: 2\r\n\r\n", False), (b"content-length: 2\r\n\r\n", True)],
)
async def test_a_connection_that_the_server_ends_is_not_used_again(head: bytes, hangs_up: bool) -> None:
    async with serving(OK + head + b"ok", hangs_up=hangs_up) as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        assert await ask(line) == (200, b"ok")
        await until(lambda: not line._idle)
        assert await ask(line) == (200, b"ok")
        assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(TWO_CHUNKS) as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        await ask(line)
        monkeypatch.setattr(wire, "IDLE_S", 0.0)
        await ask(line)
        assert server.connections == 2


async def test_an_idle_connection_is_closed_without_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "IDLE_S", 0.0)
    async with serving(TWO_CHUNKS) as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        assert await ask(line) == (200, b"abcde")
        await until(lambda: server.left == 1)
        assert not line._idle


async def test_closing_ends_a_response_too_whose_end_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "END_S", 3600.0)
    async with serving(OK + b"content-length: 9\r\n\r\nthe") as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        response = await line.post("/x", b"{}", {}, TIMEOUT_S)
        assert await response.more() == b"the"
        line.release(response, ending=True)
        line.close()
        await until(lambda: server.left == 1)


async def test_the_url_brings_a_path_and_the_headers_a_key() -> None:
    async with serving(TWO_CHUNKS) as server:
        line = Wire(f"http://127.0.0.1:{server.port}/engine/", {"Authorization": "Bearer abc"})
        await ask(line, "/generate")
        (request,) = server.requests
        assert request.startswith(b"POST /engine/generate HTTP/1.1\r\n")
        assert b"Authorization: Bearer abc\r\n" in request
        assert f"Host: 127.0.0.1:{server.port}\r\n".encode() in request
        assert b"X-One: 1\r\n" in request
        assert request.endswith(b"Content-Length: 2\r\n\r\n{}")
        line.close()


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b""])
async def test_an_invalid_answer_is_a_connection_error(answer: bytes) -> None:
    async with serving(answer, hangs_up=True) as server:
        with pytest.raises(ConnectionError):
            await ask(Wire(f"http://127.0.0.1:{server.port}"))


async def test_a_late_answer_is_a_timeout_and_the_server_is_hung_up_on() -> None:
    async with serving(OK + b"content-length: 9\r\n\r\nhalf") as server:
        with pytest.raises(TimeoutError):
            await ask(Wire(f"http://127.0.0.1:{server.port}"), timeout_s=0.1)
        await until(lambda: server.left == 1)


async def test_hanging_up_interrupts_requests_under_way() -> None:
    async with serving(OK + b"content-length: 9\r\n\r\nhalf") as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        answer = await line.post("/x", b"{}", {}, TIMEOUT_S)
        assert await answer.more() == b"half"
        line.hang_up()
        with pytest.raises(ConnectionError):
            await answer.more()
        line.release(answer)
        await until(lambda: server.left == 1)


async def test_a_response_may_end_after_it_was_released() -> None:
    async with serving(OK + b"content-length: 9\r\n\r\nhalf") as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        answer = await line.post("/x", b"{}", {}, TIMEOUT_S)
        line.release(answer, ending=True)
        answer.data_received(b"whole")
        server.answer = TWO_CHUNKS
        assert await ask(line) == (200, b"abcde")
        assert server.connections == 1
        line.close()


async def test_a_released_response_that_does_not_end_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "END_S", 0.05)
    async with serving(OK + b"content-length: 9\r\n\r\nhalf") as server:
        line = Wire(f"http://127.0.0.1:{server.port}")
        line.release(await line.post("/x", b"{}", {}, TIMEOUT_S), ending=True)
        await until(lambda: server.left == 1)
