"""Real vLLM with adapters: exact, side by side, while they come and go."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from adapters import write_adapter
from serving import ENGINE_KEY

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Adapter
from agentrl.engine.server_process import Server
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import EngineRejected, EngineUnavailable

from .reference import PROMPT, ask, gap, model

pytestmark = pytest.mark.vllm
V1, V2 = Adapter("v1-a", 1), Adapter("v2-b", 2)
ANSWER: Json = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.7}
CLOSE = 1e-4


@pytest.fixture
async def client(vllm_engine: Server) -> AsyncIterator[VLLMClient]:
    async with aiohttp.ClientSession() as http:
        with closing(VLLMClient(vllm_engine.url, http, key=ENGINE_KEY)) as client:
            yield client


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {
        V1.name: write_adapter(root / V1.name, tiny_model, seed=1, rank=4, targets=["q_proj", "up_proj", "o_proj"]),
        V2.name: write_adapter(root / V2.name, tiny_model, seed=2, rank=8),
    }


async def test_answers_of_adapters_and_of_the_base_are_exact_in_one_batch(
    client: VLLMClient, folders: dict[str, Path], tiny_model: Path
) -> None:
    from peft import PeftModel

    for adapter in (V1, V2):
        await client.load_adapter(adapter.name, folders[adapter.name])
    assert await client.adapters() == {name: str(folder) for name, folder in folders.items()}
    found = await asyncio.gather(*(ask(client, ANSWER, adapter) for adapter in (V1, None, V2)))
    assert [answer.spans for answer in found] == [[VersionSpan(version=v, start=0, end=24)] for v in (1, 0, 2)]
    base = model(tiny_model)
    adapted = [PeftModel.from_pretrained(model(tiny_model), folders[one.name]) for one in (V1, V2)]
    for reference, answer in zip([adapted[0], base, adapted[1]], found, strict=True):
        assert gap(reference, answer) < CLOSE
    assert gap(base, found[0]) > 100 * CLOSE


async def test_an_adapter_that_is_not_there_is_named(
    client: VLLMClient, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(EngineUnavailable, match="has lost adapter v9-z"):
        await ask(client, ANSWER, Adapter("v9-z", 9))
    with pytest.raises(EngineRejected, match="cannot be found"):
        await client.unload_adapter("v9-z")
    with pytest.raises(EngineRejected, match=f"did not load adapter v1-a from {tmp_path}/none"):
        await client.load_adapter(V1.name, tmp_path / "none")
    assert await client.adapters() == {}
    await client.load_adapter(V1.name, folders[V1.name])
    with pytest.raises(EngineRejected, match="already been loaded"):
        await client.load_adapter(V1.name, folders[V2.name])
    await client.unload_adapter(V1.name)
    with pytest.raises(EngineUnavailable, match="has lost adapter v1-a"):
        await ask(client, ANSWER, V1)


async def test_a_request_goes_on_with_its_adapter_after_it_was_unloaded(
    client: VLLMClient, folders: dict[str, Path], tiny_model: Path
) -> None:
    from peft import PeftModel

    await client.load_adapter(V1.name, folders[V1.name])
    running = asyncio.create_task(ask(client, ANSWER | {"max_new_tokens": 200}, V1))
    await asyncio.sleep(0.2)
    await client.unload_adapter(V1.name)
    await client.load_adapter(V2.name, folders[V2.name])
    answer = await running
    assert answer.spans == [VersionSpan(version=1, start=0, end=200)]
    assert gap(PeftModel.from_pretrained(model(tiny_model), folders[V1.name]), answer) < CLOSE


async def test_an_adapter_over_other_weights_than_the_base_is_refused(
    client: VLLMClient, folders: dict[str, Path], tiny_model: Path
) -> None:
    await client.load_adapter(V1.name, folders[V1.name])
    await client.update_weights_from_disk(tiny_model, 7)
    stream = client.generate(rid=uuid.uuid4().hex, input_ids=PROMPT, sampling_params=ANSWER, adapter=V1)
    with pytest.raises(EngineUnavailable, match="version 7 instead of the base weights"):
        await anext(stream)


async def test_all_routes_need_the_key_which_is_on_no_command_line(client: VLLMClient) -> None:
    page = {"Origin": "https://evil.example"}
    async with aiohttp.ClientSession() as http:
        for method, path in [
            ("POST", "/inference/v1/generate"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/pause"),
            ("POST", "/collective_rpc"),
            ("POST", "/update_weights_from_disk"),
            ("POST", "/v1/load_lora_adapter"),
            ("GET", "/server_info"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("OPTIONS", "/pause"),
        ]:
            answer = await http.request(method, client.url + path, headers=page)
            assert answer.status == 401, path
            assert "Access-Control-Allow-Origin" not in answer.headers
        for path in ("/ready", "/health"):
            assert (await http.get(client.url + path)).status == 200
        known = {"Authorization": f"Bearer {ENGINE_KEY}"}
        assert ENGINE_KEY not in await (await http.get(client.url + "/server_info", headers=known)).text()
    argvs = await (await asyncio.create_subprocess_exec("ps", "-eo", "args", stdout=-1)).communicate()
    assert ENGINE_KEY.encode() not in argvs[0]
