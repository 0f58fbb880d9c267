"""Versions that an engine prepares while it serves, on the fake engine and on real SGLang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from version_folders import Tensors, Values, changed, write_version

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Chunk
from agentrl.engine.control.preparation import Order, Preparation, PreparationState
from agentrl.engine.engine_client import Capability, EngineClient, Health
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.errors import CannotPrepare, EngineRejected, NotPrepared
from agentrl.testing import FakeEngine
from agentrl.versions.read_tokens import read_token

from .servers import LONG, NO_PREPARATION, PROMPT, SERVERS, collect, marked, n_tokens, rid

GREEDY: Json = {"max_new_tokens": 40, "ignore_eos": True, "temperature": 0.0}
FEW: Json = {"max_new_tokens": 2, "ignore_eos": True}
prepares = pytest.mark.parametrize(
    "url", marked(*(name for name in SERVERS if name not in NO_PREPARATION)), indirect=True
)


class Run:
    """The weights folder of a run: version 1 whole, version 2 whole, version 3 as a delta, version 4 absent."""

    def __init__(self, root: Path, base: Tensors) -> None:
        rng = np.random.default_rng(22)
        self.root = root
        one = changed(rng, base)
        two = changed(rng, one)
        three = changed(rng, two)
        self.manifests = [write_version(root, "v1-a", one), write_version(root, "v2-a", two)]
        self.manifests.append(write_version(root, "v3-a", three, (self.manifests[1], two), whole=False))
        write_version(root / "plain", "v3-a", three)

    def order(self, version: int, *, digests: bool = False, in_place: bool = True, **source: Any) -> Order:
        manifest = self.manifests[min(version, 3) - 1]
        kind = source or {"kind": "folder", "root": str(self.root), "in_place": in_place}
        name = f"v{version}-a"
        return Order(version=version, name=name, checksum=manifest.checksum, sources=[kind], digests=digests)


def tensors_of(model: Path) -> dict[str, Values]:
    """The tensors of a model folder."""
    import torch
    from safetensors.torch import load_file

    types = {torch.float32: "F32", torch.bfloat16: "BF16"}
    loaded = load_file(model / "model.safetensors")
    found = {}
    for name, tensor in sorted(loaded.items()):
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = Values(types[tensor.dtype], tuple(tensor.shape), data)
    return found


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("weights"), tensors_of(tiny_model))


async def ended(client: EngineClient) -> Preparation:
    """The preparation, once it is ready or has failed."""
    async with asyncio.timeout(60):
        while True:
            found = await client.preparation()
            assert found is not None
            if found.state in (PreparationState.READY, PreparationState.FAILED):
                return found
            await asyncio.sleep(0.01)


async def prepared(client: EngineClient, order: Order) -> Preparation:
    await client.prepare(order)
    found = await ended(client)
    assert (found.state, found.error) == (PreparationState.READY, None)
    return found


async def swapped(client: EngineClient, version: int, **options: Any) -> None:
    await client.pause("retract")
    assert await client.swap(f"v{version}-a", version, **options) >= 0
    await client.continue_generation()


async def loaded(client: EngineClient, folder: Path, version: int) -> list[dict[str, str]]:
    """The digests after a plain load."""
    await client.pause("retract")
    await client.update_weights_from_disk(folder, version)
    await client.continue_generation()
    return await client.checksums()


@pytest.mark.parametrize("url", marked(*NO_PREPARATION), indirect=True)
async def test_a_server_that_prepares_no_versions_says_so(client: EngineClient, run: Run) -> None:
    assert Capability.PREPARATION not in await client.capabilities()
    assert await client.preparation() is None
    assert client.version_source("v1-a", 0) is None
    with pytest.raises(CannotPrepare):
        await client.prepare(run.order(1))
    with pytest.raises(NotPrepared):
        await client.swap("v1-a", 1)


@prepares
async def test_an_engine_that_has_been_asked_for_nothing_has_prepared_nothing(client: EngineClient) -> None:
    found = await client.preparation()
    assert found is not None
    assert (found.name, found.version, found.state) == (None, None, PreparationState.NONE)
    with pytest.raises(NotPrepared):
        await client.prepared_digests("v1-a")


@prepares
async def test_a_swapped_version_is_the_one_that_a_plain_load_gives(client: EngineClient, run: Run) -> None:
    before = await client.checksums()
    found = await prepared(client, run.order(1, digests=True))
    assert (found.name, found.version, found.serves_versions) == ("v1-a", 1, True)
    assert await client.checksums() == before
    assert (await client.model_info()).weight_version == 0
    staged = await client.prepared_digests("v1-a")
    await swapped(client, 1)
    assert (await client.model_info()).weight_version == 1
    assert await client.checksums() == staged != before
    assert await loaded(client, run.root / "v1-a", 1) == staged
    after = await client.preparation()
    assert after is not None
    assert after.state is PreparationState.NONE


@prepares
async def test_versions_follow_each_other_also_as_deltas(client: EngineClient, run: Run) -> None:
    """The memory of the weights before takes the next version; a delta is made whole on the engine's host."""
    digests = []
    for version in (1, 2, 3):
        await prepared(client, run.order(version))
        await swapped(client, version)
        digests.append(await client.checksums())
    assert digests[2] == await loaded(client, run.root / "plain" / "v3-a", 3)
    assert digests[0] == await loaded(client, run.root / "v1-a", 1)
    assert digests[0] != digests[1] != digests[2]


def n_labelled(chunks: list[Chunk], version: int) -> int:
    return sum(chunk.version_label == version for chunk in chunks)


@prepares
async def test_a_call_goes_on_over_a_swap_and_says_which_tokens_are_whose(client: EngineClient, run: Run) -> None:
    name, chunks = rid(), []
    await prepared(client, run.order(1))
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 3:
            await swapped(client, 1)
        if n_labelled(chunks, 1) == 3:
            await client.abort(name)
    spans = chunks[-1].versions
    assert spans is not None
    assert [(span.version, span.start) for span in spans] == [(0, 0), (1, spans[0].end)]
    assert spans[1].end == n_tokens(chunks) == sum(len(chunk.logprobs) for chunk in chunks)


@pytest.mark.engine
@pytest.mark.parametrize("url", ["sglang"], indirect=True)
async def test_tokens_after_a_swap_are_those_of_the_new_weights(client: EngineClient, run: Run) -> None:
    chunks: list[Chunk] = []
    await prepared(client, run.order(1))
    long = GREEDY | {"max_new_tokens": 400}  # it must not end before the swap
    async for chunk in client.generate(rid=rid(), input_ids=PROMPT, sampling_params=long):
        chunks.append(chunk)
        if len(chunks) == 3:
            await swapped(client, 1)
    spans = chunks[-1].versions
    assert spans is not None
    assert [span.version for span in spans] == [0, 1]
    ids = [token for chunk in chunks for token in chunk.output_ids]
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    seam = spans[1].start
    await client.flush_cache()
    again = await collect(client, GREEDY | {"max_new_tokens": 30}, PROMPT + ids[:seam])
    assert [token for chunk in again for token in chunk.output_ids] == ids[seam : seam + 30]
    recomputed = [value for chunk in again for value in chunk.logprobs]
    np.testing.assert_allclose(recomputed, logprobs[seam : seam + 30], atol=1e-4)


@prepares
async def test_an_engine_samples_while_it_prepares(client: EngineClient, run: Run) -> None:
    await client.prepare(run.order(1))
    chunks = await collect(client, FEW)
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=2)]
    assert (await ended(client)).state is PreparationState.READY


@prepares
async def test_an_engine_that_is_not_paused_refuses_to_swap(client: EngineClient, run: Run) -> None:
    before = await client.checksums()
    await prepared(client, run.order(1))
    with pytest.raises(NotPrepared, match="not paused"):
        await client.swap("v1-a", 1)
    assert await client.checksums() == before
    await swapped(client, 1)
    assert (await client.model_info()).weight_version == 1


@prepares
async def test_a_pause_that_aborts_allows_no_swap_before_one_that_retracts(client: EngineClient, run: Run) -> None:
    """`abort` ends the requests and does not pause the scheduler, which swaps."""
    before = await client.checksums()
    await prepared(client, run.order(1))
    await client.pause("abort")
    with pytest.raises(NotPrepared, match="not paused"):
        await client.swap("v1-a", 1)
    assert await client.checksums() == before
    await client.pause("retract")
    await client.swap("v1-a", 1)
    await client.continue_generation()
    assert (await collect(client, FEW))[-1].versions == [VersionSpan(version=1, start=0, end=2)]


@prepares
async def test_another_version_is_not_swapped_in_and_the_engine_serves_on(client: EngineClient, run: Run) -> None:
    before = await client.checksums()
    await prepared(client, run.order(1))
    await client.pause("retract")
    with pytest.raises(NotPrepared, match="v2-a is not ready"):
        await client.swap("v2-a", 2)
    await client.continue_generation()
    assert await client.checksums() == before
    assert (await collect(client, FEW))[-1].versions == [VersionSpan(version=0, start=0, end=2)]


@prepares
async def test_a_version_that_cannot_be_read_fails_and_the_engine_serves_on(client: EngineClient, run: Run) -> None:
    await client.prepare(run.order(4))
    found = await ended(client)
    assert (found.state, found.name) == (PreparationState.FAILED, "v4-a")
    assert found.error
    await client.pause("retract")
    with pytest.raises(NotPrepared):
        await client.swap("v4-a", 4)
    await client.continue_generation()
    assert n_tokens(await collect(client, FEW)) == 2
    await prepared(client, run.order(1))


@prepares
async def test_a_newer_version_takes_the_place_of_an_older_one(client: EngineClient, run: Run) -> None:
    await client.prepare(run.order(1))
    await prepared(client, run.order(2))
    await client.pause("retract")
    with pytest.raises(NotPrepared):
        await client.swap("v1-a", 1)
    await client.swap("v2-a", 2)
    await client.continue_generation()
    assert await client.checksums() == await loaded(client, run.root / "v2-a", 2)


@prepares
async def test_other_weights_make_a_preparation_void(client: EngineClient, run: Run) -> None:
    """What was staged may keep tensors of the weights before."""
    await prepared(client, run.order(1))
    await loaded(client, run.root / "v2-a", 2)
    await client.pause("retract")
    with pytest.raises(NotPrepared):
        await client.swap("v1-a", 1)
    await client.continue_generation()
    assert (await client.model_info()).weight_version == 2


@prepares
async def test_a_cache_that_running_calls_use_is_not_flushed_by_a_swap(client: EngineClient, run: Run) -> None:
    await prepared(client, run.order(1))
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.pause("in_place")
            with pytest.raises(NotPrepared, match="cache"):
                await client.swap("v1-a", 1)
            await client.swap("v1-a", 1, flush_cache=False)
            await client.continue_generation()
        if n_labelled(chunks, 1) == 3:
            await client.abort(name)
    assert chunks[-1].versions is not None
    assert [span.version for span in chunks[-1].versions] == [0, 1]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[FakeEngine]:
    with FakeEngine(cache=tmp_path / "peer") as engine:
        yield engine


@prepares
async def test_a_host_reads_a_version_from_one_that_has_it(
    client: EngineClient, run: Run, peer: FakeEngine, tmp_path: Path
) -> None:
    await prepared(client, run.order(1, in_place=False))
    token = read_token("", "v1-a", int(time.time()) + 60)
    source = {"kind": "http", "url": f"{client.url}/agentrl/versions", "token": token}
    async with aiohttp.ClientSession() as http:
        other = SGLangClient(peer.url, http)
        found = await prepared(other, run.order(1, digests=True, **source))
        assert found.bytes >= sum(file.size_bytes for file in run.manifests[0].whole or ())
        (digests,) = await other.prepared_digests("v1-a")
    assert digests == {fact.name: fact.sha256 for fact in run.manifests[0].tensors}


@prepares
async def test_an_invalid_order_is_refused_and_the_engine_serves_on(client: EngineClient, run: Run) -> None:
    async with aiohttp.ClientSession() as http:
        for body in (b"", b"{}", b"[" * 10_000, b'{"name": "v1-a"}', b"x" * (3 << 20)):
            async with http.post(f"{client.url}/agentrl/prepare", data=body) as answer:
                assert answer.status == 400
    with pytest.raises(EngineRejected, match="400"):
        await client.prepare(run.order(1, kind="folder", root="/w", more=1))
    assert await client.health() is Health.SERVING
    assert n_tokens(await collect(client, FEW)) == 2
