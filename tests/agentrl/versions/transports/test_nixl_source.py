"""Files read from windows of another host's memory: leases, refusals, hosts that die, and the package's signatures."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from agentrl.errors import DamagedObject, StorageError
from agentrl.versions.transports import memory_windows, nixl_source, window_answer
from agentrl.versions.transports.memory_agent import MemoryAgent
from agentrl.versions.transports.memory_windows import WindowFiles, Windows
from agentrl.versions.transports.nixl_source import NIXLSource, NIXLSpec
from agentrl.versions.transports.window_answer import WINDOW_TYPE, Window, read_window
from agentrl.versions.version_sources import SOURCE_SPECS, open_source
from tests import fake_nixl
from tests.agentrl.versions.transports.test_mooncake_store import plain
from tests.version_folders import tensors, write_version

NAME, FILE, SIZE = "v1-a", "model-00001-of-00002.safetensors", 5000


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> fake_nixl.Network:
    network = fake_nixl.Network()
    monkeypatch.setitem(sys.modules, "nixl", fake_nixl.module(network))
    return network


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nixl_source, memory_windows, window_answer):
        monkeypatch.setattr(module, "WINDOW_BYTES", 1000)


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    write_version(tmp_path / "served", NAME, tensors(np.random.default_rng(0), 2000))
    return (tmp_path / "served" / NAME / FILE).read_bytes()


@pytest.fixture
def windows(host: Any, network: fake_nixl.Network, clock: Clock) -> Windows:
    made = Windows(count=2, clock=clock)
    host.answer = WindowFiles(host.files, made)
    return made


def source(host: Any, **options: Any) -> NIXLSource:
    return NIXLSource(host.url, "reads", pause=lambda seconds: None, **options)


def read(reader: NIXLSource, start: int = 0, end: int = SIZE) -> bytes:
    return b"".join(reader.read(NAME, FILE, start, end))


def asked(host: Any, method: str = "GET", token: str = "reads", file: str = FILE, **headers: str) -> httpx.Response:
    about = {"Authorization": f"Bearer {token}", "Accept": WINDOW_TYPE, "Range": "bytes=0-99"} | headers
    query = file.partition("?")
    return httpx.request(method, f"{host.url}/{NAME}/{query[0]}?{query[2]}", headers=about)


def test_the_fake_has_the_documented_signatures(network: fake_nixl.Network) -> None:
    compare(sys.modules["nixl"])


def test_the_package_has_the_documented_signatures() -> None:
    compare(pytest.importorskip("nixl", reason="no package for this fabric"))


def compare(nixl: Any) -> None:
    for name, signature in fake_nixl.SIGNATURES.items():
        assert untyped(getattr(nixl.nixl_agent, name)) == signature, name
    assert untyped(nixl.nixl_agent_config.__init__) == fake_nixl.CONFIG_SIGNATURE
    assert "NIXL_THREAD_SYNC_STRICT" in nixl.nixl_thread_sync_t.__members__


def untyped(function: Any) -> str:
    found = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    return plain(str(inspect.Signature(bare)))


def test_it_reads_windows_one_after_another(host: Any, windows: Windows, content: bytes) -> None:
    assert read(source(host), 500, SIZE) == content[500:SIZE]
    ranges = [found for path, found in host.requests if found]
    assert ranges == ["bytes=500-1499", "bytes=1500-2499", "bytes=2500-3499", "bytes=3500-4499", "bytes=4500-4999"]
    assert all(not slot.id for slot in windows._slots)


def test_a_reader_without_the_package(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(StorageError, match=rf"cannot read {host.url}/{NAME}/{FILE}: .*pip install 'agentrl\[nixl\]'"):
        read(source(host))


def test_a_host_without_the_package(
    host: Any, windows: Windows, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = source(host)
    next(reader.read(NAME, FILE, 0, 10))
    windows._agent, windows._make_agent = None, lambda: MemoryAgent()
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(StorageError, match=rf"{FILE}: it answered 406 .*pip install 'agentrl\[nixl\]'"):
        read(reader)


def test_a_host_that_knows_no_windows(host: Any, network: fake_nixl.Network, content: bytes) -> None:
    with pytest.raises(StorageError, match=f"{FILE}: it answered 206 it lends no memory"):
        read(source(host))


def test_an_agent_that_cannot_start(host: Any, network: fake_nixl.Network) -> None:
    network.cannot_start = True
    with pytest.raises(StorageError, match="NIXL cannot start: No plugins available"):
        read(source(host))


def test_memory_that_the_network_cannot_use(host: Any, network: fake_nixl.Network) -> None:
    network.no_memory = True
    with pytest.raises(StorageError, match=r"NIXL cannot use \d+ bytes of memory: NIXL_ERR_BACKEND"):
        read(source(host))


def test_a_file_that_the_host_has_not(host: Any, windows: Windows) -> None:
    with pytest.raises(StorageError, match=f"^{host.url}/{NAME}/{FILE} does not exist$"):
        read(source(host))


def test_nothing_is_asked_for_an_empty_range(host: Any, network: fake_nixl.Network) -> None:
    assert read(source(host), 5, 5) == b""
    assert network.agents == {}
    assert host.requests == []


def test_a_host_that_is_gone_after_a_read_frees_the_window_itself(host: Any, windows: Windows, content: bytes) -> None:
    class Last(MemoryAgent):
        def read(self, *about: Any) -> None:
            super().read(*about)
            host.stop()

    found = b"".join(source(host, make_agent=Last).read(NAME, FILE, 0, 10))
    assert found == content[:10]


def test_a_host_that_is_gone(host: Any, network: fake_nixl.Network) -> None:
    host.stop()
    with pytest.raises(StorageError, match=f"cannot read {host.url}/{NAME}/{FILE}"):
        read(source(host))


def test_a_host_that_disconnects(host: Any, windows: Windows, network: fake_nixl.Network, content: bytes) -> None:
    reader, network.dies_after = source(host), 2
    with pytest.raises(StorageError, match=f"{NAME}/{FILE}: NIXL cannot read: NIXL_ERR_REMOTE_DISCONNECT"):
        read(reader)
    network.dies_after = None
    assert read(reader) == content[:SIZE]


def test_a_transfer_that_hangs(host: Any, windows: Windows, network: fake_nixl.Network, content: bytes) -> None:
    network.hangs, network.unreleased = True, 1
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += memory_windows.LEASE_S / 4

    agent = MemoryAgent(clock, sleep)
    with pytest.raises(StorageError, match="NIXL cannot read: it took too long"):
        read(source(host, make_agent=lambda: agent, clock=clock))
    assert len(agent._unreleased) == 1


def test_a_read_that_ends_after_its_lease(host: Any, windows: Windows, content: bytes, clock: Clock) -> None:
    class Slow(MemoryAgent):
        def read(self, *about: Any) -> None:
            super().read(*about)
            clock.now += memory_windows.LEASE_S

    with pytest.raises(StorageError, match="the window was lent again"):
        read(source(host, make_agent=lambda: Slow(clock), clock=clock))


def test_windows_are_lent_once_until_given_back_or_expired(
    host: Any, windows: Windows, content: bytes, clock: Clock
) -> None:
    first, second = read_window(asked(host).content), read_window(asked(host).content)
    assert first.address != second.address
    assert asked(host).status_code == 503
    assert asked(host, "DELETE", file=f"{FILE}?window={second.id}").status_code == 204
    assert read_window(asked(host).content).address == second.address
    clock.now = memory_windows.LEASE_S
    assert read_window(asked(host).content).address == first.address
    assert asked(host, "DELETE", file=f"{FILE}?window=").status_code == 204  # none of that id


def test_a_reader_waits_while_all_windows_are_lent(host: Any, windows: Windows, content: bytes) -> None:
    lent = [read_window(asked(host).content) for _ in range(2)]
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            windows.give_back(lent[0].id)

    assert read(NIXLSource(host.url, "reads", pause=pause)) == content[:SIZE]
    assert len(waits) == 3


def test_a_host_whose_windows_stay_lent(host: Any, windows: Windows, content: bytes) -> None:
    for _ in range(2):
        asked(host)
    with pytest.raises(StorageError, match=f"{FILE}: it answered 503"):
        read(source(host))


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"token": "other"}, 403),
        ({"Authorization": "Basic x"}, 401),
        ({"file": "other.json"}, 404),
        ({"Range": "bytes=900000-900001"}, 416),
        ({"Range": "bytes=0-1000"}, 416),
        ({"Range": ""}, 416),
        ({"method": "PUT"}, 405),
        ({"method": "DELETE", "token": "other"}, 403),
    ],
    ids=["other token", "no token", "no file", "behind the end", "too large", "no range", "put", "delete"],
)
def test_refused_requests(host: Any, windows: Windows, content: bytes, change: dict[str, str], status: int) -> None:
    assert asked(host, **change).status_code == status


def test_a_file_that_is_deleted_while_it_is_asked_for(
    host: Any, network: fake_nixl.Network, content: bytes, clock: Clock
) -> None:
    class Late(Windows):
        def lend(self, path: Path, start: int, end: int) -> Window | None:
            path.unlink()
            return super().lend(path, start, end)

    late = Late(count=1, clock=clock)
    host.answer = WindowFiles(host.files, late)
    assert asked(host).status_code == 404
    assert [slot.id for slot in late._slots] == [""]


def answers(body: bytes) -> Any:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        about = [(b"content-type", WINDOW_TYPE.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": about})
        await send({"type": "http.response.body", "body": body})

    return answer


GOOD = Window("0" * 32, "bm8=", 4096, 1000, 30.0)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{}", "not a window"),
        (b"x" * (window_answer.MOST_ANSWER + 1), "more than"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, size=999)), "is truncated: 999 bytes at 0 instead of 1000"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, address=-1)), "not a window"),
        (msgspec.json.encode(msgspec.structs.replace(GOOD, agent="?")), "metadata of an agent is damaged"),
        (msgspec.json.encode(GOOD), "NIXL cannot read: NIXL_ERR_MISMATCH"),
    ],
    ids=["empty", "long", "short", "address", "base64", "unknown agent"],
)
def test_wrong_answers(host: Any, network: fake_nixl.Network, body: bytes, says: str) -> None:
    host.answer = answers(body)
    with pytest.raises(StorageError, match=rf"{NAME}/{FILE}.*{says}"):
        read(source(host))


def test_a_file_that_became_shorter(host: Any, windows: Windows, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "served" / NAME / FILE
    path.write_bytes(content[:4200])
    with pytest.raises(DamagedObject, match=f"{FILE} is truncated: 200 bytes at 4000 instead of 1000"):
        read(source(host))


def test_a_specification_in_json() -> None:
    spec = NIXLSpec(url="http://peer/agentrl/versions", token="secret")
    (found,) = SOURCE_SPECS.validate_json(SOURCE_SPECS.dump_json([spec]))
    assert found == spec
    assert "secret" not in f"{spec!r} {open_source(found)}"
