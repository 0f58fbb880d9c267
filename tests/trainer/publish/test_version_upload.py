"""Versions sent to a proxy that does not see the trainer's disk. The proxy's side: proxy/routes/weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from agentrl.errors import DamagedObject
from agentrl.trainer.publish import version_upload
from agentrl.trainer.publish.version_upload import UploadRefused, upload
from agentrl.versions.version_manifest import VERSION_FILE, Delta, TensorFacts, VersionFile, manifest_of
from agentrl.versions.version_uploads import Gap, Uploads

URL = "http://proxy"
TENSORS = [TensorFacts("w", "BF16", (2,), sha256(b"1234").hexdigest())]


def written(root: Path, name: str, files: dict[str, bytes], parent: str | None = None) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    facts = []
    for file, data in files.items():
        (folder / file).write_bytes(data)
        facts.append(VersionFile(file, len(data), sha256(data).hexdigest()))
    delta = None if parent is None else Delta(parent, "0" * 64, tuple(facts), 1, 2)
    manifest = manifest_of(name, TENSORS, None if delta else facts, delta)
    (folder / VERSION_FILE).write_bytes(manifest.dumps())
    return folder


class Proxy:
    """Answers as the proxy's routes do, from its receiver of version folders."""

    def __init__(self, root: Path) -> None:
        self.root, self.uploads = root, Uploads(root)
        self.puts: list[str] = []
        self.fail_after: int | None = None

    def answer(self, request: httpx.Request) -> httpx.Response:
        _, _, name, file = request.url.path.split("/")
        if request.method in ("HEAD", "GET"):
            received = 0 if file == VERSION_FILE else self.uploads.received(name, file)
            if received or not (self.root / name / file).is_file():
                return httpx.Response(404, headers={"X-Received": str(received)})
            return httpx.Response(200, content=(self.root / name / file).read_bytes())
        if self.fail_after is not None and len(self.puts) >= self.fail_after:
            raise httpx.ConnectError("gone")
        self.puts.append(f"{name}/{file}")
        try:
            if file == VERSION_FILE:
                self.uploads.complete(name, request.content)
            else:
                found = re.fullmatch(r"bytes (\d+)-\d+/\d+", request.headers.get("content-range", "bytes 0-0/0"))
                assert found is not None
                self.uploads.write(name, file, int(found[1]), request.content)
        except Gap as gap:
            return httpx.Response(409, headers={"X-Received": str(gap.received)})
        except DamagedObject as error:
            return httpx.Response(409, text=str(error))
        return httpx.Response(200)


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    monkeypatch.setattr(version_upload, "PIECE_BYTES", 4)
    return Proxy(tmp_path / "there")


@pytest.fixture
def http(proxy: Proxy) -> Iterator[httpx.Client]:
    with httpx.Client(transport=httpx.MockTransport(proxy.answer)) as client:
        yield client


def same(one: Path, other: Path) -> bool:
    return {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


FILES = {"model.safetensors": b"0123456789", "config.json": b"{}", "empty.txt": b""}


def test_a_version_is_sent_in_pieces_and_only_once(tmp_path: Path, proxy: Proxy, http: httpx.Client) -> None:
    folder = written(tmp_path / "here", "v1-a", FILES)
    assert upload(http, URL, folder) == 12
    assert same(folder, proxy.root / "v1-a")
    assert len(proxy.puts) == 3 + 1 + 1 + 1
    assert upload(http, URL, folder) == 0
    assert len(proxy.puts) == 6


@pytest.mark.parametrize("after", range(6))
def test_an_upload_goes_on_where_it_broke_off(tmp_path: Path, proxy: Proxy, http: httpx.Client, after: int) -> None:
    folder = written(tmp_path / "here", "v1-a", FILES)
    proxy.fail_after = after
    with pytest.raises(httpx.ConnectError):
        upload(http, URL, folder)
    assert not (proxy.root / "v1-a").exists()
    proxy.fail_after = None
    upload(http, URL, folder)
    assert same(folder, proxy.root / "v1-a")
    assert proxy.puts.count("v1-a/model.safetensors") == 3


def test_what_a_delta_needs_is_sent_first(tmp_path: Path, proxy: Proxy, http: httpx.Client) -> None:
    written(tmp_path / "here", "v1-a", FILES)
    written(tmp_path / "here", "v2-a", {"delta-00001-of-00001.bin": b"12"}, "v1-a")
    third = written(tmp_path / "here", "v3-a", {"delta-00001-of-00001.bin": b"34"}, "v2-a")
    upload(http, URL, third)
    assert [put for put in proxy.puts if put.endswith(VERSION_FILE)] == [f"v{n}-a/{VERSION_FILE}" for n in (1, 2, 3)]
    shutil.rmtree(proxy.root / "v3-a")
    proxy.puts.clear()
    upload(http, URL, third)
    assert proxy.puts == ["v3-a/delta-00001-of-00001.bin", f"v3-a/{VERSION_FILE}"]


@pytest.mark.parametrize("after", [0, 2, 4, 5, 6])
def test_a_version_that_was_written_again_replaces_the_old_one(
    tmp_path: Path, proxy: Proxy, http: httpx.Client, after: int
) -> None:
    """It may have files of the same name and length, and its upload may break off."""
    upload(http, URL, written(tmp_path / "before", "v1-a", FILES | {"old.txt": b"1"}))
    again = written(tmp_path / "here", "v1-a", FILES | {"model.safetensors": b"9876543210"})
    proxy.puts.clear()
    proxy.fail_after = after
    with suppress(httpx.ConnectError):
        upload(http, URL, again)
    proxy.fail_after = None
    upload(http, URL, again)
    assert same(again, proxy.root / "v1-a")
    assert proxy.puts.count("v1-a/model.safetensors") == 3
    assert upload(http, URL, again) == 0


def test_a_file_that_arrived_damaged_is_sent_again(tmp_path: Path, proxy: Proxy, http: httpx.Client) -> None:
    folder = written(tmp_path / "here", "v1-a", FILES)
    proxy.uploads.write("v1-a", "model.safetensors", 0, b"0xx")
    with pytest.raises(UploadRefused, match=r"409 .*model\.safetensors"):
        upload(http, URL, folder)
    upload(http, URL, folder)
    assert same(folder, proxy.root / "v1-a")


def test_two_trainers_that_send_one_version_complete_it(tmp_path: Path, proxy: Proxy, http: httpx.Client) -> None:
    """The other one's piece arrives between this one's question and its piece."""
    folder = written(tmp_path / "here", "v1-a", FILES)
    real = proxy.answer

    def raced(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and proxy.uploads.received("v1-a", "model.safetensors") == 4:
            proxy.uploads.write("v1-a", "model.safetensors", 4, b"45")
        return real(request)

    with httpx.Client(transport=httpx.MockTransport(raced)) as racing:
        upload(racing, URL, folder)
    assert same(folder, proxy.root / "v1-a")


def test_a_folder_without_a_manifest_and_a_proxy_without_the_route_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v1-a").mkdir()
    folder = written(tmp_path / "here", "v2-a", FILES)
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(501))) as http:
        assert upload(http, URL, tmp_path / "v1-a") == 0
        assert upload(http, URL, folder) == 0


def test_a_proxy_that_refuses_is_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "here", "v2-a", FILES)

    def refuse(request: httpx.Request) -> httpx.Response:
        return httpx.Response(403 if request.method == "PUT" else 404, text="not an admin key")

    with (
        httpx.Client(transport=httpx.MockTransport(refuse)) as http,
        pytest.raises(UploadRefused, match="403 not an admin key"),
    ):
        upload(http, URL, folder)
