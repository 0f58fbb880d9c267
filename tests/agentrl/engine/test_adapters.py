"""What we rely on in an engine that takes adapters, asserted on the fake ones and on real SGLang.

SGLang unloads an adapter when the last request that uses it has ended, and loads it again for one that names it; vLLM
forgets its name at once.
"""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from adapters import write_adapter
from serving import ENGINE_KEY

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.backends import BACKENDS
from agentrl.engine.chunks import Adapter, Chunk
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.server_process import Server
from agentrl.errors import EngineRejected, EngineUnavailable
from agentrl.testing import FakeEngine, FakeVLLM

PROMPT = [1, 87, 85, 71, 84, 201, 67, 68, 69, 70, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
LONG: Json = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 1.0}
SHORT: Json = {"max_new_tokens": 5, "ignore_eos": True}
V1, V2 = Adapter("v1-a", 1), Adapter("v2-b", 2)


def endless(input_ids: list[int], sampling_params: Json) -> list[int]:
    return [3 + i % 200 for i in range(sampling_params["max_new_tokens"])]


PATHS = {
    "sglang": [
        "GET /server_info",
        "GET /model_info",
        "POST /generate",
        "POST /pause_generation",
        "POST /update_weights_from_disk",
        "POST /load_lora_adapter",
        "POST /flush_cache",
    ],
    "vllm": [
        "GET /agentrl/server",
        "GET /weight_info",
        "POST /inference/v1/generate",
        "POST /pause",
        "POST /update_weights_from_disk",
        "POST /v1/load_lora_adapter",
        "POST /reset_prefix_cache",
        "POST /collective_rpc",
    ],
}
"""Routes that need the key, by backend; the first one describes the server."""
LIKE_SGLANG = ["fake", pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.long])]
LIKE_VLLM = ["fake-vllm"]


@pytest.fixture(params=[*LIKE_SGLANG, *LIKE_VLLM])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sglang":
        server: Server = request.getfixturevalue("sglang_for_adapters")
        yield server.url
        return
    kind = FakeVLLM if request.param == "fake-vllm" else FakeEngine
    with kind(endless, token_delay_s=0.002, key=ENGINE_KEY) as engine:
        yield engine.url


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return "vllm" if "vllm" in request.node.callspec.params["url"] else "sglang"


@pytest.fixture
async def client(url: str, backend: str) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as http:
        client = BACKENDS[backend].client(url, http, key=ENGINE_KEY)
        yield client
        client.close()


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two adapters, by name; SGLang computes some of their layers together with layers that have none."""
    root = tmp_path_factory.mktemp("weights")
    return {
        V1.name: write_adapter(root / V1.name, tiny_model, seed=1, rank=4, targets=["q_proj", "up_proj", "o_proj"]),
        V2.name: write_adapter(root / V2.name, tiny_model, seed=2, rank=8),
    }


def stream(client: EngineClient, params: Json, adapter: Adapter | None, rid: str | None = None) -> AsyncIterator[Chunk]:
    return client.generate(rid=rid or uuid.uuid4().hex, input_ids=PROMPT, sampling_params=params, adapter=adapter)


async def spans(client: EngineClient, adapter: Adapter | None) -> list[VersionSpan] | None:
    chunks = [chunk async for chunk in stream(client, SHORT, adapter)]
    assert {chunk.version_label for chunk in chunks} == {adapter.version if adapter else 0}
    return chunks[-1].versions


async def test_requests_with_and_without_adapters_run_at_once(client: EngineClient, folders: dict[str, Path]) -> None:
    assert await client.adapters() == {}
    for adapter in (V1, V2):
        await client.load_adapter(adapter.name, folders[adapter.name])
    assert await client.adapters() == {name: str(folder) for name, folder in folders.items()}
    assert await asyncio.gather(*(spans(client, adapter) for adapter in (V1, None, V2, V1))) == [
        [VersionSpan(version=version, start=0, end=5)] for version in (1, 0, 2, 1)
    ]
    assert (await client.model_info()).weight_version == 0


async def test_an_adapter_that_was_never_loaded_is_refused_before_anything_is_sampled(client: EngineClient) -> None:
    with pytest.raises(EngineUnavailable, match="has lost adapter v9-z: "):
        await spans(client, Adapter("v9-z", 9))
    with pytest.raises(EngineRejected, match=r"does not exist|cannot be found"):
        await client.unload_adapter("v9-z")


async def test_a_folder_that_cannot_be_read_and_a_name_that_is_taken_are_refused(
    client: EngineClient, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(EngineRejected, match="none"):
        await client.load_adapter(V1.name, tmp_path / "none")
    assert await client.adapters() == {}
    await client.load_adapter(V1.name, folders[V1.name])
    with pytest.raises(EngineRejected, match=r"v1-a.* already (been )?loaded"):
        await client.load_adapter(V1.name, folders[V2.name])
    assert await client.adapters() == {V1.name: str(folders[V1.name])}


@pytest.mark.parametrize("url", LIKE_SGLANG, indirect=True)
async def test_a_request_goes_on_with_its_adapter_while_others_come_and_its_own_goes(
    client: EngineClient, folders: dict[str, Path]
) -> None:
    """Unloading waits for it, and so does who loads meanwhile."""
    await client.load_adapter(V1.name, folders[V1.name])
    rid, chunks, waiting = uuid.uuid4().hex, [], []
    async for chunk in stream(client, LONG, V1, rid):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.load_adapter(V2.name, folders[V2.name])
            assert await spans(client, V2) == [VersionSpan(version=2, start=0, end=5)]
            await client.unload_adapter(V2.name)
        if len(chunks) == 3:
            waiting.append(asyncio.create_task(client.unload_adapter(V1.name)))
            while V1.name in await client.adapters():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            waiting.append(asyncio.create_task(client.load_adapter(V2.name, folders[V2.name])))
            await asyncio.wait(waiting, timeout=0.2)
        if len(chunks) == 6:
            assert not any(task.done() for task in waiting)
            await client.abort(rid)
    n_tokens = sum(len(chunk.output_ids) for chunk in chunks)
    assert 6 <= n_tokens < 1000
    assert chunks[-1].versions == [VersionSpan(version=1, start=0, end=n_tokens)]
    await asyncio.gather(*waiting)
    assert list(await client.adapters()) == [V2.name]


@pytest.mark.parametrize("url", LIKE_VLLM, indirect=True)
async def test_a_request_goes_on_with_an_adapter_that_new_requests_have_lost(
    client: EngineClient, folders: dict[str, Path]
) -> None:
    await client.load_adapter(V1.name, folders[V1.name])
    rid, chunks = uuid.uuid4().hex, []
    async for chunk in stream(client, LONG, V1, rid):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.unload_adapter(V1.name)
            assert await client.adapters() == {}
            with pytest.raises(EngineUnavailable, match="has lost adapter v1-a"):
                await spans(client, V1)
            await client.load_adapter(V2.name, folders[V2.name])
            assert await spans(client, V2) == [VersionSpan(version=2, start=0, end=5)]
        if len(chunks) == 6:
            await client.abort(rid)
    n_tokens = sum(len(chunk.output_ids) for chunk in chunks)
    assert chunks[-1].versions == [VersionSpan(version=1, start=0, end=n_tokens)]


@pytest.mark.parametrize("url", LIKE_SGLANG, indirect=True)
async def test_a_request_loads_its_unloaded_adapter_again(client: EngineClient, folders: dict[str, Path]) -> None:
    await client.load_adapter(V1.name, folders[V1.name])
    await client.unload_adapter(V1.name)
    assert await client.adapters() == {}
    assert await spans(client, V1) == [VersionSpan(version=1, start=0, end=5)]
    assert list(await client.adapters()) == [V1.name]


async def test_an_answer_of_an_adapter_over_other_weights_than_the_base_is_refused(
    client: EngineClient, folders: dict[str, Path], tiny_model: Path
) -> None:
    await client.load_adapter(V1.name, folders[V1.name])
    await client.update_weights_from_disk(tiny_model, 7)
    with suppress(EngineRejected):
        await client.flush_cache()
    with pytest.raises(EngineUnavailable, match="version 7 instead of the base weights"):
        await spans(client, V1)


async def test_an_engine_refuses_requests_without_its_key(client: EngineClient, url: str, backend: str) -> None:
    web_page = {"Origin": "https://evil.example"}
    async with aiohttp.ClientSession() as http:
        for method, path in map(str.split, PATHS[backend]):
            answer = await http.request(method, url + path, json={}, headers=web_page)
            assert answer.status == 401, path
            assert "Access-Control-Allow-Origin" not in answer.headers
        ready = await http.get(url + "/ready", headers=web_page)
        assert ready.status == 200
        assert "Access-Control-Allow-Origin" not in ready.headers
        known = {"Authorization": f"Bearer {ENGINE_KEY}"}
        described = next(path for method, path in map(str.split, PATHS[backend]) if method == "GET")
        assert ENGINE_KEY not in await (await http.get(url + described, headers=known)).text()
    argvs = await asyncio.to_thread(subprocess.check_output, ["ps", "-eo", "args"], text=True)
    assert ENGINE_KEY not in argvs
    assert await spans(client, None) == [VersionSpan(version=0, start=0, end=5)]
