"""The fake vLLM behaves as vLLM does beyond the contract: ids of requests, refusals, and what a stock server lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from agentrl.domain.schemas import Json, VersionSpan
from agentrl.engine.chunks import Chunk
from agentrl.engine.engine_client import Capability, Health
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import EngineDied, EngineError, EngineRejected, EngineUnavailable
from agentrl.testing import FakeVLLM, Reply

PARAMS: Json = {"max_tokens": 8, "logprobs": 0, "detokenize": False}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def options() -> Json:
    """Of the engine."""
    return {}


@pytest.fixture
def engine(options: Json) -> Any:
    with FakeVLLM(**options) as engine:
        yield engine


async def post(http: aiohttp.ClientSession, engine: FakeVLLM, path: str, body: Json) -> tuple[int, bytes]:
    async with http.post(engine.url + path, json=body) as answer:
        return answer.status, await answer.read()


async def ask(http: aiohttp.ClientSession, engine: FakeVLLM, **body: Any) -> tuple[int, Any]:
    """The status, and the events before `[DONE]` or the error."""
    asked = {"request_id": "a", "token_ids": [1, 4], "stream": True, "sampling_params": PARAMS} | body
    status, raw = await post(http, engine, "/inference/v1/generate", asked)
    if status != 200:
        return status, orjson.loads(raw)["error"]["message"]
    *events, done = [part.removeprefix(b"data: ") for part in raw.split(b"\n\n")[:-1]]
    assert done == b"[DONE]"
    return status, [orjson.loads(event) for event in events]


async def sample(client: VLLMClient, params: Json | None = None) -> list[Chunk]:
    stream = client.generate(rid="r", input_ids=[1, 4], sampling_params={"max_new_tokens": 8} | (params or {}))
    return [chunk async for chunk in stream]


async def test_events_have_vllms_shape(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    engine.enqueue(Reply([5, 6], logprobs=[-1, -2], cached_tokens=1))
    status, (first, last, usage) = await ask(http, engine, sampling_params=PARAMS | {"stop_token_ids": [6]})
    assert status == 200
    assert first == {
        "request_id": "generate-tokens-a",
        "usage": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": None,
                "stop_reason": None,
                "token_ids": [5],
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [{"version": "0", "start": 0, "end": 1}],
                "logprobs": {
                    "content": [
                        {
                            "token_id": 5,
                            "logprob": -1,
                            "rank": 1,
                            "top_logprobs": [{"token_id": 5, "logprob": -1, "rank": 1}],
                        }
                    ]
                },
            }
        ],
    }
    (choice,) = last["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 6)
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 2}]
    assert (usage["choices"], usage["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 1})


async def test_the_models_own_end_token_is_not_named(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    engine.enqueue([5, 2])
    _, events = await ask(http, engine)
    assert [events[-2]["choices"][0][name] for name in ("finish_reason", "stop_reason")] == ["stop", None]


@pytest.mark.parametrize("options", [{"vocab_size": 100, "context_length": 8}])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"token_ids": []}, "must not be empty"),
        ({"token_ids": [-1]}, "negative values"),
        ({"token_ids": [100]}, "Token id 100 is out of vocabulary"),
        ({"sampling_params": PARAMS | {"temperature": -1}}, "temperature"),
        ({"sampling_params": PARAMS | {"stop": ["x"]}}, "detokenize is True"),
        ({"model": "v9-z"}, "The model `v9-z` does not exist"),
    ],
)
async def test_invalid_requests_are_refused_and_kill_nothing(
    http: aiohttp.ClientSession, engine: FakeVLLM, body: Json, says: str
) -> None:
    status, message = await ask(http, engine, **body)
    assert (status, says in message) == (404 if "model" in body else 400, True), message
    assert (await ask(http, engine, sampling_params=PARAMS | {"unknown": 1}))[0] == 200  # as vLLM, without a word


@pytest.mark.parametrize("options", [{"context_length": 8}])
async def test_an_overlong_prompt_is_refused_in_the_stream(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    _, (event,) = await ask(http, engine, token_ids=[5] * 8)
    assert (event["error"]["code"], "longer than the maximum model length" in event["error"]["message"]) == (400, True)


async def test_a_request_is_aborted_by_its_whole_id(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    engine.enqueue(Reply([5, 6, 7], hold_after=1))
    asking = asyncio.create_task(ask(http, engine))
    await engine.until(lambda: engine.holding == 1)
    for name in ("a", "generate-tokens-", "generate-tokens-ab"):
        assert (await post(http, engine, "/inference/v1/abort_requests", {"request_ids": [name]}))[0] == 200
    assert engine.holding == 1
    assert (await post(http, engine, "/inference/v1/abort_requests", {}))[0] == 400
    await post(http, engine, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a"]})
    _, events = await asking
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "abort"]


async def test_a_pause_may_wait_for_the_running_requests(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    engine.enqueue(Reply([5, 6, 7], hold_after=1), [8, 2])
    running = asyncio.create_task(ask(http, engine))
    await engine.until(lambda: engine.holding == 1)
    pausing = asyncio.create_task(post(http, engine, "/pause?mode=wait", {}))
    await engine.until(lambda: engine.paused)
    later = asyncio.create_task(ask(http, engine, request_id="b"))
    await engine.until(lambda: len(engine.running) == 2)
    assert not pausing.done()
    engine.release()
    assert len((await running)[1]) == 4
    assert (await pausing)[0] == 200
    assert not later.done()
    await post(http, engine, "/resume", {})
    await later
    assert (await post(http, engine, "/pause?mode=retract", {}))[0] == 400


STOCK: Json = {"stock": True}


@pytest.mark.parametrize("options", [STOCK])
async def test_a_stock_server_has_no_number_as_its_version_until_it_gets_one(
    http: aiohttp.ClientSession, engine: FakeVLLM
) -> None:
    client = VLLMClient(engine.url, http)
    assert (await client.model_info()).version == "default"
    with pytest.raises(EngineUnavailable, match="'default' is not a number"):
        await sample(client)
    await client.label_weights(3)
    chunks = await sample(client)
    assert [chunk.versions for chunk in chunks] == [None] * 3 + [[VersionSpan(version=3, start=0, end=4)]]
    assert await client.health() is Health.SERVING
    await client.pause("in_place")
    assert await client.health() is Health.PAUSED
    engine.stop()
    engine.start()
    assert (await client.model_info()).version == "default"


@pytest.mark.parametrize("options", [STOCK])
async def test_a_stock_server_promises_less_and_says_so(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    client = VLLMClient(engine.url, http)
    assert await client.capabilities() == {Capability.GRAMMARS, Capability.PAUSES, Capability.ADAPTERS}
    await client.label_weights(0)
    with pytest.raises(EngineRejected, match="top_p"):
        await sample(client, {"top_p": 0.5})
    with pytest.raises(EngineRejected, match="cannot load"):
        await client.update_weights_from_disk("/", 1)
    assert await client.checksums() == [{"weights": "the weights of its start"}]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (STOCK | {"scale_out": False}, "403"),
        (STOCK | {"logprobs_mode": "raw_logprobs"}, "logprobs-mode processed_logprobs"),
    ],
)
async def test_a_stock_server_that_was_started_without_an_option_names_it(
    http: aiohttp.ClientSession, engine: FakeVLLM, says: str
) -> None:
    client = VLLMClient(engine.url, http)
    await client.label_weights(0)
    with pytest.raises(EngineError, match=says):
        await sample(client)


async def test_a_dead_core_ends_answers_and_health(http: aiohttp.ClientSession, engine: FakeVLLM) -> None:
    client = VLLMClient(engine.url, http)
    engine.enqueue(Reply([5, 6], hold_after=1))
    asking = asyncio.create_task(sample(client))
    await engine.until(lambda: engine.holding == 1)
    engine.kill_core()
    with pytest.raises(EngineDied):
        await asking
    assert await client.health() is Health.DEAD
    engine.stop()
    engine.start()
    assert await client.health() is Health.SERVING
