"""A run with engines of two backends: an answer goes on at one of the other kind, and its tokens stay exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.proxy.calls.sampling.sample_segment import Interrupted, Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.engines.pool import EnginePool
from agentrl.testing import FakeEngine, FakeVLLM, Reply

from .pool_setup import Store, soon, states

PARAMS: Json = {"max_new_tokens": 10, "temperature": 1.0, "stop_token_ids": [2]}
KINDS: dict[str, Callable[[], FakeEngine]] = {
    "sglang": FakeEngine,
    "vllm": FakeVLLM,
    "stock": lambda: FakeVLLM(stock=True),
}


def address(engine: FakeEngine) -> str:
    return f"vllm+{engine.url}" if isinstance(engine, FakeVLLM) else engine.url


@pytest.fixture
def kinds() -> tuple[str, str]:
    """The engine that dies, and the one that goes on."""
    return "sglang", "vllm"


@pytest.fixture
def pair(kinds: tuple[str, str]) -> Iterator[tuple[FakeEngine, FakeEngine]]:
    first, second = (KINDS[kind]() for kind in kinds)
    with first, second:
        yield first, second


@pytest.fixture
async def pool(make: Callable[..., EnginePool], pair: tuple[FakeEngine, FakeEngine], store: Store) -> EnginePool:
    """Both serve; calls go to the first one."""
    pool = make(*map(address, pair))
    for engine in pool.engines:
        await engine.client.label_weights(0)  # that of a stock server has no number
        await pool.probe(engine)
    assert states(pool) == ["serving", "serving"]
    return pool


async def answer(pool: EnginePool) -> Sampled:
    sampled, told = Sampled(), list[tuple[int, float]]()
    request = SampleRequest(session_id="s", rid="r" * 32, prompt_ids=TokenIds([1, 4]), params=PARAMS, deadline=soon())
    await sample(pool, sampled, lambda new: told.extend(zip(new.ids, new.logprobs, strict=True)), request)
    assert told == list(zip(sampled.output_ids, sampled.logprobs, strict=True))
    return sampled


def asked(engine: FakeEngine) -> list[tuple[list[int], Any]]:
    """Prompt and budget of each request, in either dialect."""
    prompts, budgets = ("token_ids", "max_tokens") if isinstance(engine, FakeVLLM) else ("input_ids", "max_new_tokens")
    return [(body[prompts], body["sampling_params"][budgets]) for body in engine.requests]


def spans(sampled: Sampled) -> list[tuple[int, int, int]]:
    return [(span.version, span.start, span.end) for span in sampled.spans]


@pytest.mark.parametrize("kinds", [*permutations(("sglang", "vllm"))])
async def test_an_answer_goes_on_at_the_other_kind_of_engine(
    pool: EnginePool, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    first, second = pair
    first.enqueue(Reply([5, 6, 7, 8], logprobs=[-1, -2, -3, -4], drop_after=2))
    second.enqueue(Reply([9, 2], logprobs=[-5, -6]))
    sampled = await answer(pool)
    assert (sampled.output_ids, sampled.logprobs) == ([5, 6, 9, 2], [-1, -2, -5, -6])
    assert (spans(sampled), sampled.finish_reason) == ([(0, 0, 4)], "stop")
    backends = [engine.backend for engine in pool.engines]
    assert sampled.engines == [(first.url, backends[0], 0), (second.url, backends[1], 2)]
    assert (asked(first), asked(second)) == ([([1, 4], 10)], [([1, 4, 5, 6], 8)])


async def test_an_engine_that_sampled_nothing_is_not_named(
    pool: EnginePool, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    first, second = pair
    first.stop()
    second.enqueue([9, 8, 2])
    sampled = await answer(pool)
    assert sampled.engines == [(second.url, "vllm", 0)]
    sampled.keep(1)
    assert (sampled.output_ids, sampled.engine_url) == ([9], second.url)


async def load_and_die(pool: EnginePool, store: Store, first: FakeEngine) -> None:
    """The engine samples a token, gets version 1, samples another one and dies."""
    await first.until(lambda: first.holding == 1)
    store.pending = {1}
    await pool.load(pool.engines[0], 1)
    first.release()


@pytest.mark.parametrize("kinds", [("vllm", "sglang")])
async def test_early_spans_keep_the_tokens_of_an_engine_that_got_new_weights_before_it_died(
    pool: EnginePool, pair: tuple[FakeEngine, FakeEngine], store: Store
) -> None:
    """Without them such an answer is interrupted: what was sent after the update may have been sampled before it."""
    first, second = pair
    first.enqueue(Reply([5, 6, 7, 8], hold_after=1, drop_after=2))
    second.enqueue([9, 2])
    asking = asyncio.create_task(answer(pool))
    await load_and_die(pool, store, first)
    sampled = await asking
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 9, 2], [(0, 0, 1), (1, 1, 2), (0, 2, 4)])
    assert asked(second) == [([1, 4, 5, 6], 8)]


@pytest.mark.parametrize("kinds", [("stock", "sglang")])
async def test_an_engine_that_names_no_version_with_its_tokens_takes_them_with_it(
    pool: EnginePool, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    first, second = pair
    first.enqueue(Reply([5, 6, 7, 8], drop_after=2))
    with pytest.raises(Interrupted, match="which weights"):
        await answer(pool)
    assert asked(second) == []


@pytest.mark.parametrize("kinds", [("vllm", "sglang")])
async def test_the_core_of_vllm_may_die_before_its_server(
    pool: EnginePool, pair: tuple[FakeEngine, FakeEngine]
) -> None:
    first, second = pair
    assert isinstance(first, FakeVLLM)
    first.enqueue(Reply([5, 6, 7, 8], hold_after=2))
    second.enqueue([9, 2])
    asking = asyncio.create_task(answer(pool))
    await first.until(lambda: first.holding == 1)
    first.kill_core()
    sampled = await asking
    assert (sampled.output_ids, spans(sampled)) == ([5, 6, 9, 2], [(0, 0, 4)])
    assert states(pool) == ["dead", "serving"]
