"""Answers of a server that cannot be the logprobs that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentrl.engine.sglang.sglang_scoring import SGLangScoring
from agentrl.errors import EngineError, EngineKeyRefused, EngineRejected, EngineUnavailable
from agentrl.testing import FakeEngine, Reply

IDS = [5, 6, 7, 8]


def answering(meta: Any) -> Callable[[web.Request], Any]:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"meta_info": meta})

    return handler


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, "no logprobs of 3 prompt tokens"),
        ({}, "no logprobs of 3 prompt tokens; does it answer as SGLang"),
        ({"input_token_logprobs": [[None, 6, None], [-1.0, 7, None]]}, "2 logprobs of 3 prompt tokens"),
        ({"input_token_logprobs": [[None, 6], [-1.0, 9], [-1.0, 8]]}, "scored token 9 in place of 7: it has another"),
        ({"input_token_logprobs": [[None, 6], [None, 7], [-1.0, 8]]}, r"\[None, 7\] as the logprob of token 7"),
        ({"input_token_logprobs": [[None, 6], [True, 7], ["x", 8]]}, "as the logprob of token"),
        ({"input_token_logprobs": [[None, 6], -1.0, -2.0]}, "-1.0 as the logprob of token 7"),
        ({"input_token_logprobs": [[None, 6], [1e999, 7], [-2.0, 8]]}, "as the logprob of token 7|invalid JSON"),
        (
            {"input_token_logprobs": [[None, 6], [-1e308, 7], [-2.0, 8]]},
            "as the logprob of token 7",
        ),  # -inf in float32
    ],
)
async def test_what_is_not_the_logprobs_of_these_tokens_is_an_error(meta: Any, message: str) -> None:
    app = web.Application()
    app.router.add_post("/generate", answering(meta))
    async with TestServer(app) as served, aiohttp.ClientSession() as http:
        server = SGLangScoring(str(served.make_url("")), http)
        with pytest.raises(EngineError, match=message):
            await server.score(IDS, 2, 10.0)


async def test_a_request_asks_for_nothing_but_logprobs_of_its_tokens() -> None:
    with FakeEngine(key="k") as engine:
        engine.score = lambda ids: [-float(token) for token in ids]
        engine.text_of = chr
        async with aiohttp.ClientSession() as http:
            scored = await SGLangScoring(engine.url, http, key="k").score([65, 66, 67, 68], 2, 10.0, texts=True)
            with pytest.raises(EngineKeyRefused):
                await SGLangScoring(engine.url, http).score(IDS, 2, 10.0)
            engine.enqueue(Reply(status=400, error="too long"))
            with pytest.raises(EngineRejected, match="too long"):
                await SGLangScoring(engine.url, http, key="k").score(IDS, 2, 10.0)
    assert scored.logprobs.tolist() == [-67.0, -68.0]
    assert scored.texts == ["C", "D"]
    (asked, _) = engine.requests
    assert asked["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
    assert (asked["logprob_start_len"], asked["return_logprob"], asked["stream"]) == (1, True, False)


async def test_a_server_that_is_gone_or_is_another_kind_is_named() -> None:
    with FakeEngine() as engine:
        url = engine.url
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EngineUnavailable, match=f"{url}/generate failed"):
            await SGLangScoring(url, http).score(IDS, 1, 10.0)
        app = web.Application()
        app.router.add_get("/model_info", answering({}))
        async with TestServer(app) as served:
            with pytest.raises(EngineError, match="does not answer as SGLang"):
                await SGLangScoring(str(served.make_url("")), http).model_path(10.0)
