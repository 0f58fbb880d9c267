"""Publishing from the trainer's memory, with scripted engines: who takes part, and what follows when one fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args
from uuid import uuid4

import aiohttp
import pytest
from pydantic import TypeAdapter, ValidationError
from serving import add_version

from agentrl.configs.publish_config import PublishConfig
from agentrl.domain.schemas import Json
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable
from agentrl.proxy.engines.delivery.filling import Filling
from agentrl.proxy.engines.tensor_transfer import CLOSING_TIMEOUT_S, Transfer, verify
from agentrl.proxy.engines.version_delivery import Delivery
from agentrl.store import events
from agentrl.testing import FakeEngine

ADMIN = {"Authorization": "Bearer admin-key"}
BUCKETS = [{"names": [name], "dtypes": ["float32"], "shapes": [[2, 3]]} for name in ("a", "b")]


def offer(transport: str, url: str, **changes: Any) -> Json:
    """What a trainer sends for one engine; no two payloads are alike."""
    if transport == "tensor":
        payloads = [[uuid4().hex], [uuid4().hex]]
        return {"transport": "tensor", "timeout_s": 5, "payloads": {url: payloads}} | changes
    if transport == "checkpoint_engine":
        handles = {"GPU-0": "ipc://@a.sock", "GPU-1": "ipc://@b.sock"}
        return {"transport": transport, "timeout_s": 5, "handles": handles, "engines": [url]} | changes
    return {
        "transport": "distributed",
        "timeout_s": 5,
        "group": "g",
        "host": "127.0.0.1",
        "port": 1,
        "backend": "gloo",
        "world_size": 2,
        "ranks": {url: 1},
        "buckets": BUCKETS,
    } | changes


def publish(proxy: Any, tmp_path: Path, version: int = 1, **body: Any) -> Any:
    folder = tmp_path / f"v{version}-s"
    folder.mkdir()
    add_version(proxy.database, proxy.run_id, version, folder)
    return proxy.post("/admin/publish", {"version": version, **body}, headers=ADMIN)


def updates(engine: FakeEngine) -> list[str]:
    """The calls that changed weights, in order."""
    return [path for path, _ in engine.calls if "weight" in path and "checker" not in path]


BY = {
    "tensor": ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"],
    "distributed": [
        "/init_weights_update_group",
        "/begin_weight_update",
        *["/update_weights_from_distributed"] * 2,
        "/end_weight_update",
        "/destroy_weights_update_group",
    ],
    "checkpoint_engine": ["/update_weights_from_ipc"],
}


@pytest.fixture
def proxy(proxy: Any) -> Any:
    """Its engine runs on one GPU."""
    proxy.engine.gpu_handles = {"GPU-1"}
    return proxy


def test_every_transport_of_the_configuration_is_tested_and_documented() -> None:
    transports = set(get_args(PublishConfig.model_fields["transport"].annotation))
    assert BY.keys() == transports - {"disk"}
    assert {offer(transport, "http://e")["transport"] for transport in BY} == BY.keys()
    page = (Path(__file__).parents[3] / "docs" / "publishing.md").read_text()
    assert {name for name in transports if f"\n| `{name}`" not in page} == set()


@pytest.mark.parametrize("transport", BY)
def test_an_engine_takes_all_buckets_and_has_the_version_with_the_last(
    proxy: Any, tmp_path: Path, transport: str
) -> None:
    members = proxy.get("/admin/publish/members", headers=ADMIN)
    assert members == [{"url": proxy.engine.url, "ranks": 1, "prepares": False}]
    answer = publish(proxy, tmp_path, transfer=offer(transport, proxy.engine.url), bytes=48).json()
    assert answer["transport"] == {proxy.engine.url: transport}
    assert answer["bytes"] == 48
    assert answer["bytes_per_s"] > 0
    assert updates(proxy.engine) == BY[transport]
    sent = [body for path, body in proxy.engine.calls if path.startswith("/update_weights_from")]
    flags = [(None, False), ("1", True)][2 - len(sent) :]  # with the last request
    assert [(body["weight_version"], body["flush_cache"]) for body in sent] == flags
    assert proxy.engine.version == "1"
    assert not proxy.engine.paused
    (event,) = proxy.database.query(events.of_run, proxy.run_id, "publish")
    assert event.data["transport"] == answer["transport"]


@pytest.mark.parametrize("transport", BY)
def test_an_engine_that_cannot_load_the_tensors_reads_the_folder(proxy: Any, tmp_path: Path, transport: str) -> None:
    proxy.engine.fail_next_update = "no such tensor"
    answer = publish(proxy, tmp_path, transfer=offer(transport, proxy.engine.url)).json()
    assert answer["transport"] == {proxy.engine.url: "disk"}
    assert updates(proxy.engine)[-1] == "/update_weights_from_disk"
    assert (proxy.engine.version, proxy.engine.paused, proxy.engine.updating) == ("1", False, False)
    assert proxy.engine.groups == set()
    again = publish(proxy, tmp_path, 2, transfer=offer(transport, proxy.engine.url)).json()
    assert again["transport"] == {proxy.engine.url: transport}


def test_an_unfinished_update_is_closed(proxy: Any, tmp_path: Path) -> None:
    proxy.engine.updating = True
    assert publish(proxy, tmp_path, transfer=offer("tensor", proxy.engine.url)).status_code == 200
    assert not proxy.engine.updating


@pytest.mark.parametrize("digests", [{"a": "2"}, {}])
def test_a_payload_is_sent_once_even_if_the_publish_is_repeated(proxy: Any, tmp_path: Path, digests: Json) -> None:
    """The whole publish is repeated, as a client between would; the engine took the payloads, and may not have."""
    proxy.engine.digests = {"a": "1"}
    if not digests:
        proxy.engine.fail_next_update = "no such tensor"
    body = {"transfer": offer("tensor", proxy.engine.url), "digests": digests}
    assert publish(proxy, tmp_path, **body).status_code == (503 if digests else 200)
    taken = [call["serialized_named_tensors"] for path, call in proxy.engine.calls if path.endswith("_from_tensor")]
    proxy.engine.version, proxy.engine.paused = 0, False  # as one that was restarted: it has not got the version
    again = proxy.post("/admin/publish", {"version": 1, **body, "digests": {}}, headers=ADMIN)
    assert again.json()["transport"] == {proxy.engine.url: "disk"}
    sent = [call["serialized_named_tensors"] for path, call in proxy.engine.calls if path.endswith("_from_tensor")]
    assert sent == taken
    assert len({str(payload) for payload in sent}) == len(sent)


def test_an_engine_that_is_no_member_reads_the_folder(proxy: Any, tmp_path: Path) -> None:
    answer = publish(proxy, tmp_path, transfer=offer("tensor", "http://127.0.0.1:9")).json()
    assert answer["transport"] == {proxy.engine.url: "disk"}


def test_weights_that_differ_are_not_served(proxy: Any, tmp_path: Path) -> None:
    proxy.engine.digests = {"a": "1", "b": "2", "c": "3"}
    refused = publish(proxy, tmp_path, digests={"a": "1", "b": "0", "z": "9"})
    assert refused.status_code == 503
    assert "b has digest 2, not 0" in refused.text
    assert proxy.get("/api/run")["current_version"] == 0
    right = proxy.post("/admin/publish", {"version": 1, "digests": {"a": "1", "z": "9"}}, headers=ADMIN).json()
    assert right["verified"] == {proxy.engine.url: 1}
    assert right["unverified"] == {}


@pytest.mark.parametrize(
    ("digests", "why"), [({}, "no digests were sent"), ({"z": "9"}, "keeps none of the tensors as they were sent")]
)
def test_a_publish_says_why_nothing_was_compared(proxy: Any, tmp_path: Path, digests: Json, why: str) -> None:
    answer = publish(proxy, tmp_path, digests=digests).json()
    assert answer["verified"] == {proxy.engine.url: 0}
    assert why in answer["unverified"][proxy.engine.url]
    (event,) = proxy.database.query(events.of_run, proxy.run_id, "publish")
    assert event.data["unverified"] == answer["unverified"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"transport": "carrier pigeon"}, "transport"),
        ({"buckets": [{"names": ["a"], "dtypes": [], "shapes": [[1]]}]}, "have the same length"),
        ({"buckets": []}, "buckets"),
        ({"port": 0}, "port"),
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(proxy: Any, tmp_path: Path, wrong: Json, named: str) -> None:
    refused = publish(proxy, tmp_path, transfer=offer("distributed", proxy.engine.url) | wrong)
    assert refused.status_code == 422
    assert named in refused.text
    assert updates(proxy.engine) == []
    with pytest.raises(ValidationError):
        TypeAdapter(Transfer).validate_python(offer("distributed", "http://e") | wrong)


@pytest.mark.parametrize("gpus", [set(), {"GPU-7"}], ids=["no package", "another GPU"])
def test_an_engine_that_cannot_take_handles_reads_the_folder(proxy: Any, tmp_path: Path, gpus: set[str]) -> None:
    proxy.engine.gpu_handles = gpus
    answer = publish(proxy, tmp_path, transfer=offer("checkpoint_engine", proxy.engine.url)).json()
    assert answer["transport"] == {proxy.engine.url: "disk"}
    assert (proxy.engine.version, proxy.engine.paused) == ("1", False)


class Stuck(SGLangClient):
    """A client of an engine that takes no tensors, and does not answer when the transfer is closed."""

    refusal: EngineError | None = None

    async def join_group(self, *_: Any, **__: Any) -> None:
        pass

    async def begin_update(self) -> None:
        pass

    async def receive_tensors(self, *_: Any, **__: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        await asyncio.Event().wait()

    take_tensors = receive_tensors

    async def end_update(self, timeout_s: float | None = None) -> None:
        raise EngineUnavailable("no answer")

    async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
        raise EngineUnavailable("no answer")


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
async def test_the_end_of_the_time_is_not_replaced_by_what_closing_raises(transport: str) -> None:
    """`publish.update_timeout_s` cancels a transfer: the engine must not read the folder without a limit."""
    url = "http://engine"
    transfer: Any = TypeAdapter(Transfer).validate_python(offer(transport, url))
    async with aiohttp.ClientSession() as http:
        client = Stuck(url, http)
        filling = Filling(base_for=_no_base, timeout_s=60.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await filling.load(client, 1, "/folder", Delivery(transfer), flush=True)
        client.refusal = EngineRejected("no room")
        again: Any = TypeAdapter(Transfer).validate_python(offer(transport, url))
        with pytest.raises(EngineRejected, match="no room"):
            await again.load(client, 1, flush_cache=True)


async def test_an_engine_that_does_not_join_in_time_leaves_the_group() -> None:
    """It may join later, and would keep the group's connections for ever."""
    left: list[tuple[str, float | None]] = []

    class Late(Stuck):
        async def join_group(self, *_: Any, **__: Any) -> None:
            raise EngineUnavailable("no answer in time")

        async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
            left.append((group, timeout_s))

    transfer: Any = TypeAdapter(Transfer).validate_python(offer("distributed", "http://engine"))
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineUnavailable, match="no answer in time"):
            await transfer.load(Late("http://engine", http), 1, flush_cache=True)
    assert left == [(transfer.group, CLOSING_TIMEOUT_S)]


async def _no_base(version: int) -> None:
    return None


async def test_without_digests_nothing_is_compared(fake_engine: FakeEngine) -> None:
    async with aiohttp.ClientSession() as http:
        client = SGLangClient(fake_engine.url, http)
        fake_engine.digests = {"a": "1"}
        assert await verify(client, {"a": "1"}) == 1
        with pytest.raises(EngineError, match="a has digest 1, not 2"):
            await verify(client, {"a": "2"})
        assert await verify(client, {}) == 0
