"""vLLM's own server, without our launcher: it samples, pauses and keeps its label, and refuses what it cannot do."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from serving import START_TIMEOUT_S

from agentrl.domain.schemas import VersionSpan
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import Capability, Health
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server, free_port
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable
from agentrl.processes import children

from .reference import PROMPT, ask, gap, model

pytestmark = pytest.mark.vllm
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
LABEL = "--weight-version"
FEW = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def stock(
    request: pytest.FixtureRequest, with_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("stock") / "engine.log"
    spec = EngineSpec(backend="vllm", model=tiny_model, port=free_port(), log_file=log_file, context_length=2048)
    spec = replace(spec, extra_args=("--logprobs-mode", request.param))
    python, _, _, *rest = BACKENDS["vllm"].argv(spec)
    at = rest.index(LABEL)
    with log_file.open("ab") as log:
        command = [python, "-m", ENTRY, *rest[:at], *rest[at + 2 :]]
        process = children.start_blocking(command, env=BACKENDS["vllm"].environment(spec), output=log)
    server = Server(spec, process)
    try:
        asyncio.run(server.wait_healthy(START_TIMEOUT_S))
        yield server
    finally:
        server.stop()


@pytest.fixture
async def client(stock: Server) -> AsyncIterator[VLLMClient]:
    async with aiohttp.ClientSession() as http:
        with closing(VLLMClient(stock.url, http)) as client:
            yield client


async def test_a_stock_server_says_what_it_cannot_promise(client: VLLMClient, stock: Server, tiny_model: Path) -> None:
    assert await client.capabilities() == {Capability.GRAMMARS, Capability.PAUSES}
    if "raw_logprobs" in stock.spec.extra_args:
        with pytest.raises(EngineError, match="needs --logprobs-mode processed_logprobs"):
            await ask(client, FEW)
        return
    with pytest.raises(EngineUnavailable, match="'default' is not a number"):
        await ask(client, FEW)
    await client.label_weights(0)
    answer = await ask(client, FEW | {"temperature": 0.7})
    assert answer.spans == [VersionSpan(version=0, start=0, end=12)]
    assert gap(model(tiny_model), answer) < 1e-4
    stream = client.generate(rid=uuid.uuid4().hex, input_ids=PROMPT, sampling_params=FEW)
    assert [chunk.version_label async for chunk in stream][:-1] == [None] * 11
    with pytest.raises(EngineRejected, match="top_p, top_k and min_p need an engine that was started by agentrl"):
        await ask(client, FEW | {"top_p": 0.9})
    with pytest.raises(EngineRejected, match="start it with agentrl engine --backend vllm"):
        await client.update_weights_from_disk(tiny_model, 1)
    assert (await client.model_info()).version == "0"
    (digests,) = await client.checksums()
    assert digests
    await client.pause("retract")
    assert await client.health() is Health.PAUSED
    await client.flush_cache()
    await client.continue_generation()
    assert await client.health() is Health.SERVING
