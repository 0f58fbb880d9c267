"""Real vLLM of which one process is killed: the call says so, the whole engine ends, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from pathlib import Path

import aiohttp
import psutil
import pytest
from serving import serving

from agentrl.engine.engine_client import Health
from agentrl.engine.server_process import Server
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import EngineDied

from .reference import PROMPT

pytestmark = pytest.mark.vllm
ENDS_S = 30.0
TITLES = {"core": "EngineCore", "worker": "Worker"}


def family(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.pid).children(recursive=True)


def process_of(server: Server, part: str) -> psutil.Process:
    """The process of a part: vLLM names those that its API server starts."""
    if part == "api":
        return next(each for each in family(server) if "keyed_vllm" in " ".join(each.cmdline()[:3]))
    return next(each for each in family(server) if TITLES[part] in " ".join(each.cmdline()))


async def killed_in_an_answer(server: Server, part: str) -> None:
    async with aiohttp.ClientSession() as http:
        client = VLLMClient(server.url, http)
        params = {"max_new_tokens": 1500, "ignore_eos": True}
        stream = client.generate(rid=uuid.uuid4().hex, input_ids=PROMPT, sampling_params=params)
        await anext(stream)
        os.kill(process_of(server, part).pid, signal.SIGKILL)
        with pytest.raises(EngineDied):
            async for _ in stream:
                pass
        assert await client.health() is Health.DEAD
        client.close()


@pytest.mark.parametrize("part", ["api", "core", "worker"])
def test_a_killed_part_ends_the_call_and_the_whole_engine(
    with_vllm: None, tiny_model: Path, tmp_path: Path, part: str
) -> None:
    with serving(tiny_model, tmp_path / "engine.log", backend="vllm", context_length=2048) as server:
        processes = family(server)
        assert len(processes) >= 4  # the keeper, the API server, the core, the worker
        asyncio.run(killed_in_an_answer(server, part))
        _, alive = psutil.wait_procs(processes, timeout=ENDS_S)
        assert alive == []
        asyncio.run(asyncio.wait_for(server.wait(), ENDS_S))  # its guard ends too
