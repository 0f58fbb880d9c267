"""What we rely on in an engine, asserted on the fake one and on real SGLang, so that the fake cannot drift."""

from __future__ import annotations

import asyncio
import json
import random
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path

import aiohttp
import orjson
import pytest

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.backends import BACKENDS
from agentrl.engine.grammars import MAX_ENUM, MAX_LENGTH, MAX_NUMBER, MAX_PROPERTIES
from agentrl.engine.sampling_params import MAX_STOP_CHARS, NUMBERS, ParamRefused, check
from agentrl.engine.server_process import Server
from agentrl.engine.sglang_client import Chunk, EngineClient, Health, Memory
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable
from agentrl.rendering import load_renderer
from agentrl.testing import FakeEngine

# <|im_start|>user\nabcd<|im_end|>\n<|im_start|>assistant\n with the tiny model's byte tokens
PROMPT = [1, 87, 85, 71, 84, 201, 67, 68, 69, 70, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
VOCAB = 259
EDGES = [name for name in NUMBERS if name not in ("max_new_tokens", "stream_interval")]
SCHEMAS: list[Json] = [
    {"enum": [str(i) for i in range(MAX_ENUM)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_PROPERTIES)}},
    {"type": "string", "minLength": MAX_LENGTH, "maxLength": MAX_LENGTH},
    {"type": "string", "pattern": "[^\\s\\S]"},
    {"type": "array", "items": {"$ref": "#"}, "minItems": MAX_LENGTH},
    {"type": "integer", "minimum": MAX_NUMBER, "maximum": -MAX_NUMBER},
    {"type": "number", "minimum": 1e-300, "maximum": 1e-299},
    {"type": "string", "format": "nonsense"},
]
LONG: Json = {"max_new_tokens": 1000, "ignore_eos": True, "temperature": 1.0}


def endless(input_ids: list[int], sampling_params: Json) -> list[int]:
    """As many tokens as asked for, as a model with `ignore_eos` gives."""
    n = sampling_params["max_new_tokens"]
    return [3 + i % 200 for i in range(n if sampling_params.get("ignore_eos") else 3)] + [2]


SERVERS = {"fake": "sglang", "fake-cumulative": "sglang", "sglang": "sglang"}
"""Server under test → its backend. A new backend is a new entry, and a new branch of `url`."""
NO_TENSORS: frozenset[str] = frozenset()
"""The servers that take weights only from a folder."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.engine] * (name == "sglang")) for name in SERVERS])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "sglang":
        server: Server = request.getfixturevalue("sglang_engine")
        yield server.url
        return
    cumulative = request.param == "fake-cumulative"
    with FakeEngine(endless, cumulative=cumulative, context_length=2048, token_delay_s=0.002) as engine:
        yield engine.url


@pytest.fixture
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[EngineClient]:
    kind = BACKENDS[SERVERS[request.node.callspec.params["url"]]]
    async with aiohttp.ClientSession() as http:
        with closing(kind(url, http)) as client:
            yield client


def test_every_backend_is_under_contract() -> None:
    assert set(SERVERS.values()) == set(BACKENDS)


def rid() -> str:
    return uuid.uuid4().hex


async def collect(client: EngineClient, params: Json, ids: list[int] = PROMPT, name: str | None = None) -> list[Chunk]:
    return [chunk async for chunk in client.generate(rid=name or rid(), input_ids=ids, sampling_params=params)]


def n_tokens(chunks: list[Chunk]) -> int:
    return sum(len(chunk.output_ids) for chunk in chunks)


async def test_chunks_are_increments_and_the_last_one_says_why_it_ended(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 5, "ignore_eos": True})
    assert n_tokens(chunks) == 5
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert all(len(chunk.output_ids) == len(chunk.logprobs) for chunk in chunks)
    assert all(logprob <= 0 for chunk in chunks for logprob in chunk.logprobs)


async def test_a_stop_names_the_token_that_stopped_it(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 400, "stop_token_ids": [2]})
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].matched_stop == 2
    assert chunks[-1].output_ids[-1] == 2  # the stop token is part of the output


async def test_the_likeliest_tokens_of_every_position(client: EngineClient) -> None:
    params = {"max_new_tokens": 5, "ignore_eos": True}
    stream = client.generate(rid=rid(), input_ids=PROMPT, sampling_params=params, top_logprobs=3)
    async for chunk in stream:
        assert chunk.top_logprobs is not None
        assert [len(likeliest) for likeliest in chunk.top_logprobs] == [3] * len(chunk.output_ids)
        for token, logprob, likeliest in zip(chunk.output_ids, chunk.logprobs, chunk.top_logprobs, strict=True):
            assert likeliest == sorted(likeliest, reverse=True)
            assert [p for p, other in likeliest if other == token] in ([logprob], [])


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["sglang"])  # in the name, by which tests/spread.py keeps it beside the others
async def test_a_structural_tag_binds_what_is_sampled(sglang_engine: Server, tiny_model: Path, kind: str) -> None:
    """Tokens, text and JSON, as the grammars of forced calls have them; then nothing but the end."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    elements = [
        {"type": "token", "token": 70},
        {"type": "const_string", "value": "calc("},
        {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1},
        {"type": "tag", "begin": "<", "content": {"type": "any_text", "max_chars": 3}, "end": ">"},
        {"type": "token", "token": 71},
    ]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})
    async with aiohttp.ClientSession() as http:
        with closing(EngineClient(sglang_engine.url, http, key=sglang_engine.spec.key)) as client:
            chunks = await collect(client, {"max_new_tokens": 60, "structural_tag": tag, "stop_token_ids": [2]})
    ids = [token for chunk in chunks for token in chunk.output_ids]
    text = load_renderer(tiny_model).decode(ids).replace("\ufffd", "")  # bytes that are no characters do not count
    assert (ids[0], ids[-2:]) == (70, [71, 2]), text
    assert re.fullmatch(r'.calc\(\{\s*"a"\s*:\s*(true|false)\s*\}<[^>]{0,3}>..*', text, re.DOTALL)
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.parametrize("grammar", [{"regex": "(("}, {"json_schema": '{"type": "nonsense"}'}])
async def test_a_grammar_that_does_not_compile_is_refused(client: EngineClient, grammar: Json) -> None:
    with pytest.raises(EngineRejected, match="grammar"):
        await collect(client, {"max_new_tokens": 5, **grammar})
    assert n_tokens(await collect(client, {"max_new_tokens": 5, "ignore_eos": True})) == 5


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


async def test_abort_ends_the_stream_and_keeps_the_tokens(client: EngineClient) -> None:
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.abort(name)
    assert chunks[-1].finish_reason == "abort"
    assert 2 <= n_tokens(chunks) < 1000
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=n_tokens(chunks))]


async def test_abort_while_retracted_keeps_the_tokens(client: EngineClient) -> None:
    """Nothing is sampled between the pause and the abort: what is said of the weights holds."""
    name, chunks = rid(), []
    async for chunk in client.generate(rid=name, input_ids=PROMPT, sampling_params=LONG):
        chunks.append(chunk)
        if len(chunks) == 2:
            await client.pause("retract")
            await client.abort_all()
    assert await client.paused()  # it ends although nothing goes on
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].versions == [VersionSpan(version=0, start=0, end=n_tokens(chunks))]
    assert n_tokens(chunks) < 1000
    await client.continue_generation()


async def test_abort_before_the_first_token(client: EngineClient) -> None:
    await client.pause("retract")
    waiting = asyncio.create_task(collect(client, LONG))
    while not (await asyncio.wait([waiting], timeout=0.05))[0]:  # where it waits, it cannot be seen
        await client.abort_all()
        await client.continue_generation()
    chunks = waiting.result()
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].versions == ([VersionSpan(version=0, start=0, end=n)] if (n := n_tokens(chunks)) else [])


async def test_a_stream_interval_reduces_the_events(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 20, "ignore_eos": True, "stream_interval": 8})
    ends = list(accumulate(len(chunk.output_ids) for chunk in chunks))
    assert ends[-1] == 20
    assert set(ends) <= {1, 9, 17, 20}  # an engine under load may merge neighbouring events


async def test_every_event_names_the_version_it_was_sent_under(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 5, "ignore_eos": True})
    assert [chunk.version_label for chunk in chunks] == [0] * len(chunks)


async def test_an_engine_reports_whether_it_is_paused(client: EngineClient) -> None:
    assert not await client.paused()
    await client.pause("in_place")
    assert await client.paused()
    await client.continue_generation()


async def test_hanging_up_interrupts_requests_under_way(client: EngineClient) -> None:
    stream = client.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG)
    await anext(stream)
    client.hang_up()
    with pytest.raises(EngineUnavailable):
        async for _ in stream:
            pass
    assert await client.health() is Health.SERVING


async def test_abort_of_an_unknown_request_is_harmless(client: EngineClient) -> None:
    await client.abort(rid())
    assert await client.health() is Health.SERVING


async def test_a_paused_engine_is_not_dead_and_holds_requests(client: EngineClient) -> None:
    await client.pause("retract")
    assert await client.health() is Health.PAUSED
    waiting = asyncio.create_task(collect(client, {"max_new_tokens": 2, "ignore_eos": True}))
    assert (await client.model_info()).weight_version == 0
    assert not waiting.done()
    await client.continue_generation()
    assert n_tokens(await waiting) == 2
    assert await client.health() is Health.SERVING


async def test_continue_without_pause_is_harmless(client: EngineClient) -> None:
    await client.continue_generation()
    assert await client.health() is Health.SERVING


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


async def test_an_overlong_prompt_is_refused_in_the_stream(client: EngineClient) -> None:
    with pytest.raises(EngineRejected, match="longer than"):
        await collect(client, {"max_new_tokens": 2}, ids=[5] * 3000)


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
    assert (await client.model_info()).weight_version == 0


async def test_the_deadline_holds_while_paused(client: EngineClient) -> None:
    await client.pause("retract")
    with pytest.raises(EngineError, match="did not answer within"):
        async for _ in client.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG, timeout_s=0.5):
            pass
    await client.continue_generation()


def edges(seed: int, count: int) -> list[Json]:
    """Parameters at the edges of what an engine is sent, each with others that are drawn."""
    pick = random.Random(seed)
    found: list[Json] = []
    while len(found) < count:
        drawn: Json = {"max_new_tokens": 3}
        for name in pick.sample(EDGES, pick.choice((1, 2, 4))):
            number = NUMBERS[name]
            ends = [number.low, number.high, number.low + 1, number.high - 1, 0, 1]
            drawn[name] = pick.choice(ends if number.whole else [*ends, 1e-6, 1e-9, 1e-30, 5e-324, 0.5])
        if pick.random() < 0.3:
            drawn["logit_bias"] = {str(pick.randrange(VOCAB)): pick.choice((-100.0, 100.0)) for _ in range(50)}
        if pick.random() < 0.3:
            drawn["stop"] = pick.choices(["\0", "\U0010ffff", "x" * MAX_STOP_CHARS, "é" * 300, "<|im_end|>"], k=32)
        if pick.random() < 0.3:
            drawn["json_schema"] = orjson.dumps(pick.choice(SCHEMAS)).decode()
        with suppress(ParamRefused):
            check(drawn, VOCAB)
            found.append(drawn)
    return found


async def test_an_engine_survives_whatever_it_is_sent(client: EngineClient) -> None:
    """`engine.params.check` lets these through: they are sampled or refused, and it serves on."""

    async def ask(params: Json) -> int:
        try:
            return n_tokens(await collect(client, {"ignore_eos": True, **params}))
        except EngineRejected:  # a grammar that it cannot compile
            assert "json_schema" in params
            return 1

    answered = await asyncio.gather(*(ask(params) for params in edges(seed=16, count=60)))
    assert all(1 <= n <= 3 for n in answered)
    assert await client.health() is Health.SERVING
    assert n_tokens(await collect(client, {"max_new_tokens": 5, "ignore_eos": True})) == 5
