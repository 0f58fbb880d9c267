"""Reading version files over HTTP: broken connections, busy and wrong servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.versions import http_source
from agentrl.versions.http_source import HTTPSource
from tests.version_folders import tensors, write_version

NAME, FILE = "v1-a", "model-00001-of-00002.safetensors"


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    write_version(tmp_path / "served", NAME, tensors(np.random.default_rng(0), 200_000))
    return (tmp_path / "served" / NAME / FILE).read_bytes()


def source(host: Any, token: str = "reads") -> HTTPSource:
    return HTTPSource(host.url, token, pause=lambda seconds: None)


def read(host: Any, start: int, end: int) -> bytes:
    return b"".join(source(host).read(NAME, FILE, start, end))


def test_a_manifest(host: Any, content: bytes) -> None:
    assert source(host).manifest(NAME).name == NAME
    assert source(host).manifest("v2-b") is None


def test_a_file_and_a_part_of_it(host: Any, content: bytes) -> None:
    assert read(host, 0, len(content)) == content
    assert read(host, 1000, 5000) == content[1000:5000]
    assert read(host, 7, 7) == b""


def test_it_goes_on_where_a_connection_broke(host: Any, content: bytes) -> None:
    host.break_after = lambda path: 600_000
    assert read(host, 0, len(content)) == content
    starts = [int(ranges.removeprefix("bytes=").partition("-")[0]) for _, ranges in host.requests]
    assert len(starts) > 2
    assert starts == sorted(set(starts))
    assert starts[1] == 600_000


def test_connections_that_break_again_and_again(host: Any, content: bytes) -> None:
    host.break_after = lambda path: 10
    with pytest.raises(StorageError, match=rf"cannot read {host.url}/{NAME}/{FILE}: "):
        read(host, 0, len(content))
    assert len(host.requests) == http_source.TRIES


def test_a_server_that_is_gone(host: Any) -> None:
    gone = source(host)
    host.stop()
    with pytest.raises(StorageError, match="cannot read"):
        gone.manifest(NAME)


def test_a_file_that_is_not_there(host: Any, content: bytes) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        list(source(host).read(NAME, "other.json", 0, 5))


def test_a_token_that_is_refused(host: Any, content: bytes) -> None:
    with pytest.raises(StorageError, match="it answered 403"):
        source(host, "other").manifest(NAME)


def answers(status: int, body: bytes, **headers: str) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        about = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": about})
        await send({"type": "http.response.body", "body": body})

    return answer


@pytest.mark.parametrize(
    ("status", "body", "headers", "says"),
    [
        (200, b"abcd", {"content_length": "4"}, "does not support ranges"),
        (206, b"abcd", {"content_range": "bytes 0-3/100"}, "another range"),
        (206, b"abcd", {"content_range": "bytes 10-13/x"}, "another range"),
        (206, b"abcd", {"content_range": "bytes 10-13/12"}, "has 12 bytes"),
        (206, b"abcdefgh", {"content_range": "bytes 10-17/100"}, "more bytes"),
        (206, b"abcd", {"content_range": "bytes 10-13/100", "content_encoding": "gzip"}, "it answered 206"),
        (302, b"", {"location": "http://elsewhere/"}, "it answered 302"),
        (416, b"", {}, "it answered 416"),
        (503, b"", {"retry_after": "1"}, "it answered 503"),
    ],
    ids=["no ranges", "other start", "no size", "short", "long", "encoded", "redirect", "416", "busy"],
)
def test_wrong_answers(host: Any, status: int, body: bytes, headers: dict[str, str], says: str) -> None:
    host.answer = answers(status, body, **headers)
    with pytest.raises(StorageError, match=says):
        read(host, 10, 14)


def test_a_manifest_that_is_too_large(host: Any, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(http_source, "MANIFEST_BYTES", 100)
    with pytest.raises(DamagedObject, match="bytes"):
        source(host).manifest(NAME)


def test_a_server_that_is_too_slow(host: Any, content: bytes) -> None:
    times = iter(range(0, 10_000, 100))
    slow = HTTPSource(host.url, "reads", clock=lambda: next(times))
    with pytest.raises(StorageError, match="too slow"):
        list(slow.read(NAME, FILE, 0, 1000))
