"""A worker's heart beats on, whatever its proxy answers, and stops with the worker."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

from agentrl.client import AsyncClient
from agentrl.errors import RequestError
from agentrl.rollout.heart import beating


@pytest.fixture
async def client(proxy: Any) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, "k", timeout_s=30) as made:
        yield made


async def until_beats(proxy: Any, count: int) -> None:
    async with asyncio.timeout(120):
        while len(proxy.history) < count:  # noqa: ASYNC110 - the stand-in lives in another thread
            await asyncio.sleep(0.005)


async def test_the_first_beat_is_there_before_the_work_begins(proxy: Any, client: AsyncClient) -> None:
    about = {"host": socket.gethostname(), "pid": os.getpid(), "sessions": 3}
    async with beating(client, "me", lambda: 3):
        assert proxy.history == [("/heartbeat", {"owner": "me", "about": about}, "k")]


async def test_work_does_not_begin_after_a_refused_heartbeat(proxy: Any, client: AsyncClient) -> None:
    proxy.faults["/heartbeat"] = [JSONResponse({}, 401)]
    with pytest.raises(RequestError):
        async with beating(client, "me"):
            pytest.fail("the work began")


@pytest.mark.parametrize("answer", [JSONResponse({}, status) for status in (500, 503, 401, 200)])
async def test_a_failed_beat_is_followed_by_the_next(
    proxy: Any, client: AsyncClient, answer: JSONResponse, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.heartbeat_timeout_s = 0.06
    with caplog.at_level(logging.WARNING):
        async with beating(client, "me"):
            proxy.faults["/heartbeat"] = [answer]
            await until_beats(proxy, 5)
    assert proxy.faults["/heartbeat"] == []
    assert "a heartbeat failed" in caplog.text


async def test_a_proxy_that_is_away_is_waited_for(
    proxy: Any, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.heartbeat_timeout_s = 0.06
    async with beating(client, "me"):
        with monkeypatch.context() as away:
            tried = asyncio.Event()

            async def refused(*_: Any, **__: Any) -> None:
                tried.set()
                raise httpx.ConnectError("connection refused")

            away.setattr(client._http, "request", refused)
            await asyncio.wait_for(tried.wait(), 120)
        await until_beats(proxy, len(proxy.history) + 2)


async def test_a_hanging_heartbeat_is_abandoned_for_the_next(
    proxy: Any, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.heartbeat_timeout_s = 0.3
    async with beating(client, "me"):
        with monkeypatch.context() as stuck, caplog.at_level(logging.WARNING):
            tried = asyncio.Queue[None]()

            async def hang(*_: Any, **__: Any) -> None:
                tried.put_nowait(None)
                await asyncio.Event().wait()

            stuck.setattr(client._http, "request", hang)
            for _ in range(3):
                await asyncio.wait_for(tried.get(), 120)
        await until_beats(proxy, len(proxy.history) + 2)
    assert "a heartbeat failed: TimeoutError()" in caplog.text


async def test_the_heart_stops_with_the_work(proxy: Any, client: AsyncClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with beating(client, "me"):
            _ = 1 / 0
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "heartbeat"] == []
