"""A run's workers start when its scorers answer."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentrl.console import Console
from agentrl.engine.server_process import free_port
from agentrl.errors import EngineUnavailable
from agentrl.launch import local_run
from agentrl.launch.parts import Plan
from agentrl.launch.views.live_panel import Display

from .local_config import a_plan, config


def scored(tmp_path: Path, model: Path, port: int, start_timeout_s: float) -> Plan:
    """The plan of a run that serves one reward model."""
    run = config(
        tmp_path,
        model,
        reward={"function": "reward_model", "args": {"model": "runs/style/model"}},
        engine={"start_timeout_s": start_timeout_s},
    )
    return a_plan(run, model, scorer_ports=(port,))


async def until_scoring(plan: Plan) -> None:
    await local_run._until_scoring(plan, Display(plan.config, Console(file=io.StringIO())))


@asynccontextmanager
async def answering(port: int) -> AsyncIterator[None]:
    """Something that answers every request with 200."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield


async def test_a_scorer_that_starts_late_is_awaited(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "POLL_S", 0.01)
    port = free_port()
    waiting = asyncio.create_task(until_scoring(scored(tmp_path, model, port, 60)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    async with answering(port):
        await waiting


async def test_a_scorer_that_never_answers_ends_the_run_by_its_name(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "POLL_S", 0.01)
    with pytest.raises(EngineUnavailable, match=r"scorer of runs/style/model does not answer after 0\.05 s"):
        await until_scoring(scored(tmp_path, model, free_port(), 0.05))
