"""Serving version files: ranges, tags, tokens, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from agentrl.versions.version_files import Part, VersionFiles, WeightsFolder, part_of

DATA = bytes(range(200)) * 10
FILE = "/versions/v2-b/model.safetensors"


def allowed(token: str, name: str) -> bool:
    return token == f"reads {name}"


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path / "weights" / "v2-b"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "secret.key", ".stamp", "modeling.py"):
        (folder / name).write_bytes(DATA)
    (folder / "empty.json").write_bytes(b"")
    app = VersionFiles([WeightsFolder(tmp_path / "none"), WeightsFolder(tmp_path / "weights")], allowed)
    headers = {"Authorization": "Bearer reads v2-b"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://host", headers=headers) as client:
        yield client


async def test_a_whole_file(http: httpx.AsyncClient) -> None:
    answer = await http.get(FILE)
    assert (answer.status_code, answer.content) == (200, DATA)
    assert (answer.headers["accept-ranges"], answer.headers["content-length"]) == ("bytes", "2000")


async def test_the_disk_is_read_by_other_threads(tmp_path: Path) -> None:
    """A slow disk holds up no other request."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    threads = set()

    class Slow(WeightsFolder):
        def locate(self, name: str, file: str) -> Path | None:
            threads.add(threading.current_thread())
            return path

    transport = httpx.ASGITransport(VersionFiles([Slow(tmp_path)], allowed))
    async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
        answer = await client.get(FILE, headers={"Authorization": "Bearer reads v2-b"})
    assert answer.content == DATA
    assert threads
    assert threading.current_thread() not in threads


async def test_head_has_no_body(http: httpx.AsyncClient) -> None:
    answer = await http.head(FILE)
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "2000")


async def test_an_empty_file(http: httpx.AsyncClient) -> None:
    answer = await http.get("/versions/v2-b/empty.json")
    assert (answer.status_code, answer.content) == (200, b"")


async def test_a_range(http: httpx.AsyncClient) -> None:
    answer = await http.get(FILE, headers={"Range": "bytes=100-299"})
    assert (answer.status_code, answer.content) == (206, DATA[100:300])
    assert answer.headers["content-range"] == "bytes 100-299/2000"


async def test_a_range_behind_the_end(http: httpx.AsyncClient) -> None:
    answer = await http.get(FILE, headers={"Range": "bytes=2000-"})
    assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */2000")


async def test_a_range_of_an_older_file_gives_the_whole(http: httpx.AsyncClient) -> None:
    tag = (await http.get(FILE)).headers["etag"]
    assert (await http.get(FILE, headers={"Range": "bytes=1-2", "If-Range": tag})).status_code == 206
    assert (await http.get(FILE, headers={"Range": "bytes=1-2", "If-Range": '"old"'})).status_code == 200


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("", Part(0, 10)),
        ("bytes=0-", Part(0, 10)),
        ("bytes=3-3", Part(3, 4)),
        ("bytes=3-99", Part(3, 10)),
        ("bytes=-4", Part(6, 10)),
        ("bytes=-99", Part(0, 10)),
        ("bytes=-0", None),
        ("bytes=10-", None),
        ("bytes=10-12", None),
        ("bytes=5-2", Part(0, 10)),
        ("bytes=1-2,4-5", Part(0, 10)),
        ("bytes=-", Part(0, 10)),
        ("lines=1-2", Part(0, 10)),
        ("bytes=" + "9" * 30 + "-", Part(0, 10)),
    ],
    ids=range(14),
)
def test_parts(wanted: str, part: Part | None) -> None:
    assert part_of(10, wanted) == part


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/versions/v2-b/secret.key", 404),
        ("/versions/v2-b/.stamp", 404),
        ("/versions/v2-b/modeling.py", 404),
        ("/versions/v2-b/other.safetensors", 404),
        ("/versions/v2-b/", 404),
        ("/versions/v2-b", 404),
        ("/", 404),
        ("/versions/v2-b/%2e%2e", 404),
        ("/versions/%2e%2e/model.safetensors", 404),
        ("/versions/v2-b/..%2fv2-b%2fmodel.safetensors", 200),  # one file, whatever the spelling of its path
        ("/versions/v3-c/model.safetensors", 403),
    ],
    ids=range(11),
)
async def test_only_files_of_versions_are_served(http: httpx.AsyncClient, path: str, status: int) -> None:
    assert (await http.get(path)).status_code == status


@pytest.mark.parametrize("value", ["", "Bearer ", "Basic reads v2-b"], ids=["none", "empty", "basic"])
async def test_no_token(http: httpx.AsyncClient, value: str) -> None:
    assert (await http.get(FILE, headers={"Authorization": value})).status_code == 401


async def test_other_methods(http: httpx.AsyncClient) -> None:
    assert (await http.put(FILE, content=b"x")).status_code == 405


async def test_more_readers_than_it_serves(tmp_path: Path) -> None:
    (tmp_path / "v2-b").mkdir()
    (tmp_path / "v2-b" / "model.safetensors").write_bytes(DATA)
    app = VersionFiles([WeightsFolder(tmp_path)], lambda token, name: True, most_readers=0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
        answer = await client.get(FILE, headers={"Authorization": "Bearer x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
