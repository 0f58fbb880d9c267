"""Routed experts, on the fake engine and on real SGLang with a random mixture."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from mixture_folder import save_served_mixture
from serving import serving

from agentrl.domain.experts.routed_experts import RoutedExperts, RouteOrigin, RoutingShape
from agentrl.domain.schemas import Json
from agentrl.engine.chunks import Chunk, unpacked_experts
from agentrl.engine.engine_client import EngineClient
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.models import routing_shape
from agentrl.testing import FakeEngine

from .conftest import endless
from .servers import LONG, PROMPT, rid

SHAPE = RoutingShape(layers=3, top_k=2, experts=8)
FEW: Json = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(
    scope="module",
    params=["fake", "fake-cumulative", pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.long])],
)
def mixture_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sglang":
        folder: Path = save_served_mixture(tmp_path_factory.mktemp("mixture"))
        assert routing_shape(folder) == SHAPE
        with serving(folder, folder / "engine.log", routed_experts=True) as server:
            yield server.url
        return
    cumulative = request.param == "fake-cumulative"
    with FakeEngine(endless, cumulative=cumulative, token_delay_s=0.002, routing=SHAPE) as engine:
        yield engine.url


@pytest.fixture
async def mixture(mixture_url: str) -> AsyncIterator[EngineClient]:
    async with aiohttp.ClientSession() as http:
        with closing(SGLangClient(mixture_url, http)) as client:
            yield client


async def ask(
    client: EngineClient, first: int | None, params: Json = FEW, ids: list[int] = PROMPT, name: str | None = None
) -> list[Chunk]:
    stream = client.generate(rid=name or rid(), input_ids=ids, sampling_params=params, experts_from=first)
    return [chunk async for chunk in stream]


def experts_of(chunks: list[Chunk]) -> RoutedExperts:
    assert all(chunk.routed_experts is None for chunk in chunks[:-1])
    assert chunks[-1].routed_experts is not None
    found = RoutedExperts.parse(unpacked_experts(chunks[-1].routed_experts), SHAPE)
    assert (found.origins == RouteOrigin.RECORDED).all()
    return found


async def test_the_last_event_has_the_experts_of_every_computed_position(mixture: EngineClient) -> None:
    chunks = await ask(mixture, 0)
    assert len(experts_of(chunks)) == len(PROMPT) + 6 - 1
    assert chunks[-1].retractions == 0


async def test_a_cached_prefix_has_the_experts_of_the_request_that_computed_it(mixture: EngineClient) -> None:
    ids = [*PROMPT[:-2], 99, *PROMPT[-2:]]
    first, again = [experts_of(await ask(mixture, 0, ids=ids)) for _ in range(2)]
    np.testing.assert_array_equal(first.ids[: len(ids) - 1], again.ids[: len(ids) - 1])


async def test_rows_may_begin_anywhere_in_the_prompt(mixture: EngineClient) -> None:
    whole = experts_of(await ask(mixture, 0))
    for start in (1, len(PROMPT) - 1, len(PROMPT)):
        part = experts_of(await ask(mixture, start))
        assert len(part) == len(whole) - start
        of_prompt = len(PROMPT) - 1 - start
        np.testing.assert_array_equal(part.ids[: max(0, of_prompt)], whole.ids[start : len(PROMPT) - 1])


async def test_nobody_gets_experts_without_asking(mixture: EngineClient) -> None:
    assert (await ask(mixture, None))[-1].routed_experts is None


async def test_a_retracted_request_says_so_and_reports_all_positions(mixture: EngineClient) -> None:
    chunks: list[Chunk] = []
    params = LONG | {"max_new_tokens": 40}
    async for chunk in mixture.generate(rid=rid(), input_ids=PROMPT, sampling_params=params, experts_from=0):
        chunks.append(chunk)
        if len(chunks) == 2:
            await mixture.pause("retract")
            await mixture.continue_generation()
    assert chunks[0].retractions == 0
    assert chunks[-1].retractions == 1
    assert len(experts_of(chunks)) == len(PROMPT) + 40 - 1


async def test_an_aborted_request_reports_what_was_computed_or_nothing(mixture: EngineClient) -> None:
    name, chunks = rid(), []
    async for chunk in mixture.generate(rid=name, input_ids=PROMPT, sampling_params=LONG, experts_from=0):
        chunks.append(chunk)
        if len(chunks) == 2:
            await mixture.abort(name)
    assert chunks[-1].finish_reason == "abort"
    tokens = sum(len(chunk.output_ids) for chunk in chunks)
    assert len(experts_of(chunks)) == len(PROMPT) + tokens - 1


async def test_a_request_that_is_aborted_in_the_queue_reports_none(mixture: EngineClient) -> None:
    chunks: list[Chunk] = []
    async for chunk in mixture.generate(rid=rid(), input_ids=PROMPT, sampling_params=LONG, experts_from=0):
        chunks.append(chunk)
        if len(chunks) == 2:
            await mixture.pause("retract")
            await mixture.abort_all()
    await mixture.continue_generation()
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].routed_experts is None
