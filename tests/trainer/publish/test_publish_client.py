"""The publisher's requests: which engines prepare, what the proxy has, and what it offers to engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest
import torch

from agentrl.configs.publish_config import PublishConfig
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.trainer.publish import publish_client
from agentrl.trainer.publish.engine_handles import Group, NoHandles
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.publish.tensor_sharing import NoRoom
from agentrl.trainer.publish.version_upload import UploadRefused
from agentrl.trainer.weights.published import Published

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def publisher(said: list[str]) -> Publisher:
    """Gives up after a few attempts."""
    return Publisher("http://proxy", "admin-key", lambda pause_s: pause_s > 1, said.append)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    def client(self: Publisher, timeout_s: float) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(answer))

    monkeypatch.setattr(Publisher, "_client", client)


def gone(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("gone")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([{"url": "a", "ranks": 1, "prepares": True}, {"url": "b", "ranks": 1, "prepares": True}], True),
        ([{"url": "a", "ranks": 1, "prepares": True}, {"url": "b", "ranks": 1, "prepares": False}], False),
        ([{"url": "a", "ranks": 1}], False),
        ([], False),
    ],
)
def test_all_engines_that_answer_must_prepare(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, members: list[Json], expected: bool
) -> None:
    answering(monkeypatch, lambda _: httpx.Response(200, json=members))
    assert publisher.prepares() is expected


@pytest.mark.parametrize("answer", [gone, lambda _: httpx.Response(503)], ids=["gone", "busy"])
def test_a_proxy_that_does_not_answer_has_no_engine_that_prepares(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    answering(monkeypatch, answer)
    assert not publisher.prepares()


@pytest.mark.parametrize("status", [409, 507, 503])
def test_an_upload_that_may_work_later_is_tried_again(
    publisher: Publisher, said: list[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    refused = [UploadRefused(httpx.Response(status, request=httpx.Request("PUT", "http://proxy/versions/v1-a/w")))]

    def upload(http: httpx.Client, url: str, folder: Path) -> int:
        if refused:
            raise refused.pop()
        return 1

    monkeypatch.setattr(publish_client, "upload", upload)
    answering(monkeypatch, lambda _: httpx.Response(200))
    assert publisher.publish(1, 0, Published(Path("v1-a"), "c"))
    assert len(said) == 1
    assert f"PUT /versions/v1-a/w: {status}" in said[0]


def test_an_upload_that_is_refused_ends_the_publish(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    def upload(http: httpx.Client, url: str, folder: Path) -> int:
        raise UploadRefused(httpx.Response(403, request=httpx.Request("PUT", "http://proxy/versions/v1-a/w")))

    monkeypatch.setattr(publish_client, "upload", upload)
    answering(monkeypatch, lambda _: httpx.Response(200))
    with pytest.raises(AgentRLError, match="publishing version 1 failed: PUT /versions/v1-a/w: 403"):
        publisher.publish(1, 0, Published(Path("v1-a"), "c"))


Transport = Literal["disk", "distributed", "tensor", "checkpoint_engine"]
MEMBERS: list[Json] = [{"url": "http://e", "ranks": 2}]
MADE = Published(Path("v1-a"), "c")


class Offering(Offers):
    """Offers without tensors: what the engines are offered is the arguments. `fails` is raised instead."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.fails = fails
        self.open = 0

    @property
    def ranks(self) -> int:
        return 3

    @contextmanager
    def _offer(self, *offered: object) -> Iterator[Json]:
        if self.fails is not None:
            raise self.fails
        self.open += 1
        yield {"offered": offered}
        self.open -= 1

    @contextmanager
    def broadcast(self, members: Sequence[Json], device: torch.device, timeout_s: float) -> Iterator[Json]:
        with self._offer("broadcast", members, str(device), timeout_s) as offer:
            yield offer

    @contextmanager
    def shared(self, members: Sequence[Json], timeout_s: float) -> Iterator[Json]:
        with self._offer("shared", members, timeout_s) as offer:
            yield offer

    @contextmanager
    def handed(self, folder: Path, members: Sequence[Json], group: Group) -> Iterator[Json]:
        with self._offer("handed", str(folder), members, group.size, group.bucket_bytes, group.timeout_s) as offer:
            yield offer


class Proxy:
    """Answers as a proxy with these members; refuses the first `busy` publishes. `asked` has what was published."""

    def __init__(self, members: list[Json] | None, offering: Offering, busy: int = 0) -> None:
        self.members, self.offering, self.busy = members, offering, busy
        self.paths: list[str] = []
        self.transfers: list[Json | None] = []
        self.open: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        if request.url.path == "/admin/publish/members":
            return httpx.Response(503) if self.members is None else httpx.Response(200, json=self.members)
        self.transfers.append(json.loads(request.content)["transfer"])
        self.open.append(self.offering.open)
        return httpx.Response(503 if len(self.transfers) <= self.busy else 200)


def published(
    monkeypatch: pytest.MonkeyPatch, transport: Transport, proxy: Proxy, made: Published | None = MADE
) -> list[str]:
    """Publish a version; what the publisher said meanwhile."""
    said: list[str] = []
    config = PublishConfig(transport=transport, timeout_s=7, update_timeout_s=9, bucket_bytes=2048)
    answering(monkeypatch, proxy)
    monkeypatch.setattr(publish_client, "upload", lambda http, url, folder: 0)
    publisher = Publisher("http://proxy", "admin-key", lambda pause_s: pause_s > 1, said.append, config)
    assert publisher.publish(1, 0, made, proxy.offering)
    return said


@pytest.mark.parametrize(
    ("transport", "offered"),
    [
        ("tensor", ["shared", MEMBERS, 7.0]),
        ("distributed", ["broadcast", MEMBERS, "cpu", 7.0]),
        ("checkpoint_engine", ["handed", "v1-a", MEMBERS, 3, 2048, 9.0]),
    ],
)
def test_engines_are_offered_the_tensors_while_the_proxy_publishes(
    monkeypatch: pytest.MonkeyPatch, transport: Transport, offered: list[object]
) -> None:
    proxy = Proxy(MEMBERS, Offering())
    assert published(monkeypatch, transport, proxy) == []
    assert proxy.transfers == [{"offered": offered}]
    assert proxy.open == [1]
    assert proxy.offering.open == 0


def test_without_a_transport_no_members_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(MEMBERS, Offering())
    published(monkeypatch, "disk", proxy)
    assert proxy.transfers == [None]
    assert proxy.paths == ["/admin/publish"]


@pytest.mark.parametrize("members", [[], None], ids=["none", "unknown"])
@pytest.mark.parametrize("transport", ["tensor", "distributed", "checkpoint_engine"])
def test_without_an_engine_that_answers_nothing_is_offered(
    monkeypatch: pytest.MonkeyPatch, transport: Transport, members: list[Json] | None
) -> None:
    proxy = Proxy(members, Offering(AssertionError("offered")))
    published(monkeypatch, transport, proxy)
    assert proxy.transfers == [None]


@pytest.mark.parametrize("made", [None, Published(Path("v1-a"), "c", whole=False)], ids=["unknown", "a delta"])
def test_checkpoint_engine_sends_whole_files_only(monkeypatch: pytest.MonkeyPatch, made: Published | None) -> None:
    proxy = Proxy(MEMBERS, Offering(AssertionError("offered")))
    published(monkeypatch, "checkpoint_engine", proxy, made)
    assert proxy.transfers == [None]


def test_the_tensors_are_offered_once_and_later_attempts_use_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(MEMBERS, Offering(), busy=2)
    (said,) = published(monkeypatch, "tensor", proxy)
    assert said == "publishing version 1: the proxy answered 503: ; trying again until it works"
    assert [transfer is None for transfer in proxy.transfers] == [False, True, True]


@pytest.mark.parametrize("fails", [NoRoom("no room in shared memory"), NoHandles("gave no handles")])
def test_tensors_that_cannot_be_offered_are_read_from_the_folder(
    monkeypatch: pytest.MonkeyPatch, fails: AgentRLError
) -> None:
    proxy = Proxy(MEMBERS, Offering(fails))
    (said,) = published(monkeypatch, "checkpoint_engine", proxy)
    assert str(fails) in said
    assert proxy.transfers == [None]
