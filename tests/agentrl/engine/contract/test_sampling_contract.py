"""Tokens, stops, grammars and events of an answer; whatever the engine is sent, it serves on."""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import orjson
import pytest

from agentrl.domain.schemas import Json
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient, Health
from agentrl.engine.grammars import MAX_ENUM, MAX_LENGTH, MAX_NUMBER, MAX_PROPERTIES
from agentrl.engine.sampling_params import MAX_STOP_CHARS, NUMBERS, ParamRefused, check
from agentrl.errors import EngineRejected
from agentrl.rendering import load_renderer

from .servers import MARKS, PROMPT, SERVERS, collect, marked, n_tokens, rid

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


def test_every_backend_is_under_contract() -> None:
    assert set(SERVERS.values()) == set(BACKENDS)


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


@pytest.mark.parametrize("url", marked(*MARKS), indirect=True)
async def test_a_structural_tag_binds_what_is_sampled(client: EngineClient, tiny_model: Path) -> None:
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


async def test_a_stream_interval_reduces_the_events(client: EngineClient) -> None:
    chunks = await collect(client, {"max_new_tokens": 20, "ignore_eos": True, "stream_interval": 8})
    ends = list(accumulate(len(chunk.output_ids) for chunk in chunks))
    assert ends[-1] == 20
    assert set(ends) <= {1, 9, 17, 20}  # an engine under load may merge neighbouring events


async def test_an_overlong_prompt_is_refused_in_the_stream(client: EngineClient) -> None:
    with pytest.raises(EngineRejected, match="longer than"):
        await collect(client, {"max_new_tokens": 2}, ids=[5] * 3000)


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
        except EngineRejected:  # a grammar that it cannot compile, or a temperature that it would change
            assert "json_schema" in params or 0 < params.get("temperature", 0) < 0.01
            return 1

    answered = await asyncio.gather(*(ask(params) for params in edges(seed=16, count=60)))
    assert all(1 <= n <= 3 for n in answered)
    assert await client.health() is Health.SERVING
    assert n_tokens(await collect(client, {"max_new_tokens": 5, "ignore_eos": True})) == 5
