"""Versions, weights and memory of an engine, while calls run."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from pathlib import Path

import pytest

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import Capability, EngineClient, Memory
from agentrl.errors import EngineRejected

from .servers import LONG, NO_RELEASE, NO_TENSORS, PROMPT, SERVERS, collect, marked, n_tokens, rid


async def test_version_spans_cover_the_output(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 5, "ignore_eos": True})
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=5)]


def n_labelled(chunks: list[Chunk], version: int) -> int:
    """How many chunks the engine sent with this version; those sent before may be read only now."""
    return sum(chunk.version_label == version for chunk in chunks)


async def test_spans_show_a_change_of_weights_in_the_middle(client: EngineClient, tiny_model: Path) -> None:
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 3:
            await client.pause("retract")
            await client.update_weights_from_disk(tiny_model, 7)
            await client.continue_generation()
        if n_labelled(chunks, 7) == 3:
            await client.abort(name)
    spans = chunks[-1].versions
    assert spans is not None
    assert [span.version for span in spans] == [0, 7]
    assert spans[0].start == 0
    assert spans[0].end == spans[1].start
    assert spans[1].end == n_tokens(chunks)
    assert (await client.model_info()).weight_version == 7


releases = pytest.mark.parametrize("url", marked(*(name for name in SERVERS if name not in NO_RELEASE)), indirect=True)


@pytest.mark.parametrize("url", marked(*NO_RELEASE), indirect=True)
async def test_a_server_that_keeps_its_memory_says_so(client: EngineClient) -> None:
    assert Capability.MEMORY not in await client.capabilities()
    for refused in (client.release_memory, client.resume_weights, client.resume_cache):
        with pytest.raises(EngineRejected, match="release its memory"):
            await refused()


async def release(client: EngineClient) -> None:
    await client.pause("retract")
    await client.flush_cache()
    await client.release_memory()


async def reload(client: EngineClient, folder: Path, version: int) -> None:
    await client.resume_weights()
    assert (await client.model_info()).memory is Memory.RELOADING
    await client.update_weights_from_disk(folder, None)
    await client.resume_cache()
    await client.label_weights(version)
    await client.continue_generation()


@releases
async def test_a_call_continues_where_it_was_after_memory_was_released(client: EngineClient, tiny_model: Path) -> None:
    """Retracted calls keep their place, calls that arrive wait, and no token is sampled without weights."""
    name, chunks, waiting = rid(), [], None
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 3:
            await release(client)
            assert (await client.model_info()).memory is Memory.RELEASED
            assert await client.paused()
            waiting = asyncio.create_task(collect(client, {"max_new_tokens": 2, "ignore_eos": True}))
            await reload(client, tiny_model, 8)
            assert not await client.paused()
        if n_labelled(chunks, 8) == 3:
            await client.abort(name)
    spans = chunks[-1].versions
    assert spans is not None
    assert [(span.version, span.start) for span in spans] == [(0, 0), (8, spans[0].end)]
    assert spans[1].end == n_tokens(chunks)
    assert (await client.model_info()).memory is Memory.HELD
    assert waiting is not None
    assert (await waiting)[-1].versions == [VersionSpan(version=8, start=0, end=2)]


@releases
async def test_a_call_that_is_aborted_while_memory_is_released_keeps_its_tokens(
    client: EngineClient, tiny_model: Path
) -> None:
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await release(client)
            await client.abort_all()
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=n_tokens(chunks))]
    await reload(client, tiny_model, 0)
    assert n_tokens(await collect(client, {"max_new_tokens": 2, "ignore_eos": True})) == 2


async def test_a_cache_that_running_calls_use_is_not_flushed(client: EngineClient) -> None:
    """By this a release knows that it would kill the server."""
    stream = client.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG)
    await anext(stream)
    with pytest.raises(EngineRejected):
        await client.flush_cache()
    await client.pause("in_place")
    with pytest.raises(EngineRejected):
        await client.flush_cache()
    await client.pause("retract")
    await client.flush_cache()
    await client.continue_generation()
    await stream.aclose()


async def test_spans_come_with_every_event_where_that_is_promised(client: EngineClient) -> None:
    """By them a call that breaks off keeps its tokens."""
    early = Capability.EARLY_SPANS in await client.capabilities()
    chunks = await collect(client, {"max_new_tokens": 5, "ignore_eos": True})
    ends = accumulate(len(chunk.output_ids) for chunk in chunks)
    spans = [[VersionSpan(version=0, start=0, end=end)] for end in ends]
    assert [chunk.versions for chunk in chunks] == (spans if early else [None] * (len(chunks) - 1) + spans[-1:])


async def test_every_event_names_the_version_it_was_sent_under(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 5, "ignore_eos": True})
    assert [chunk.version_label for chunk in chunks] == [0] * len(chunks)


async def test_a_bad_path_is_refused_and_changes_nothing(client: EngineClient, tmp_path: Path) -> None:
    with pytest.raises(EngineRejected):
        await client.update_weights_from_disk(tmp_path / "absent", 9)
    assert (await client.model_info()).weight_version == 0
    assert n_tokens(await collect(client, {"max_new_tokens": 2, "ignore_eos": True})) == 2


async def test_weights_are_given_another_label_and_stay_what_they_are(client: EngineClient) -> None:
    before = await client.checksums()
    await client.label_weights(7)
    assert (await client.model_info()).version == "7"
    assert await client.checksums() == before
    chunks = await collect(client, {"max_new_tokens": 3, "ignore_eos": True})
    assert chunks[-1].versions == [VersionSpan(version=7, start=0, end=3)]


async def test_digests_are_stable_and_the_cache_can_be_flushed(client: EngineClient) -> None:
    (first,), (second,) = await client.checksums(), await client.checksums()
    assert first == second != {}
    await client.flush_cache()


async def test_tensors_are_taken_between_begin_and_end_only(
    client: EngineClient, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["url"] in NO_TENSORS:
        with pytest.raises(EngineRejected):  # without a number of ranks, no publish sends tensors to it
            await client.tensor_ranks()
        return
    assert await client.tensor_ranks() == 1
    with pytest.raises(EngineRejected, match="no weight-update session is open"):
        await client.end_update()
    bucket: Json = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}
    with pytest.raises(EngineRejected, match="begin_weight_update"):
        await client.receive_tensors("g", bucket, version=3, flush_cache=True, timeout_s=10)
    with pytest.raises(EngineRejected, match="begin_weight_update"):
        await client.take_tensors([""], version=3, flush_cache=True, timeout_s=10)
    await client.begin_update()
    with pytest.raises(EngineRejected, match="already open"):
        await client.begin_update()
    with pytest.raises(EngineRejected, match="Failed to receive weights"):
        await client.receive_tensors("g", bucket, version=3, flush_cache=True, timeout_s=10)
    await client.end_update()
    with pytest.raises(EngineRejected, match="does not exist"):
        await client.leave_group("g")
    with pytest.raises(EngineRejected, match="checkpoint-engine is not installed"):
        await client.take_handles({"GPU-0": "ipc://@a.sock"}, version=3, flush_cache=True, timeout_s=10)
    assert (await client.model_info()).weight_version == 0
