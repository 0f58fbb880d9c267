"""The publisher's requests: can all engines prepare, and does the proxy have the version's files?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError
from agentrl.trainer.publish import publish_client
from agentrl.trainer.publish.publish_client import Publisher
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
