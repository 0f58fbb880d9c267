"""Real SGLang and real vLLM in one run: one is killed in mid-answer, and the other continues the answer exactly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

import psutil
import pytest
import torch
from serving import serving
from transformers import AutoModelForCausalLM

from agentrl.domain.schemas import Json
from agentrl.domain.tokens import TokenIds
from agentrl.engine.server_process import Server
from agentrl.proxy.calls.sampling.sample_segment import Sampled
from agentrl.proxy.calls.sampling.sampling import SampleRequest, sample
from agentrl.proxy.dialects.model_answer import Tokens
from agentrl.proxy.engines.pool import EnginePool

from .pool_setup import soon, states

pytestmark = pytest.mark.vllm
PROMPT = [1, 87, 85, 71, 84, 201, 67, 68, 69, 70, 2, 201, 1, 67, 85, 85, 75, 85, 86, 67, 80, 86, 201]
TOKENS, SEEN = 120, 10
TEMPERATURE = 0.7
PARAMS: Json = {"max_new_tokens": TOKENS, "temperature": TEMPERATURE, "ignore_eos": True}
LARGEST_GAP = 1e-4


@pytest.fixture(scope="module", params=[*permutations(("sglang", "vllm"))], ids="-".join)
def pair(
    with_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[list[Server]]:
    """The server that is killed, and the one that goes on."""
    folder = tmp_path_factory.mktemp("pair")
    with ExitStack() as stack:
        yield [
            stack.enter_context(serving(tiny_model, folder / f"{backend}.log", backend=backend, context_length=2048))
            for backend in request.param
        ]


def kill(server: Server) -> None:
    for process in psutil.Process(server.pid).children(recursive=True):
        process.kill()


@torch.no_grad()
def computed(model: Path, output: list[int]) -> list[float]:
    """The logprobs of an answer's tokens by transformers, in float32."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logits = lm(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1] / TEMPERATURE
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return found


async def test_an_answer_goes_on_exactly_at_the_other_server(
    make: Callable[..., EnginePool], pair: list[Server], tiny_model: Path
) -> None:
    first, second = pair
    pool = make(*(f"{server.spec.backend}+{server.url}" for server in pair))
    for engine in pool.engines:
        await pool.probe(engine)
    assert states(pool) == ["serving", "serving"]
    sampled, told = Sampled(), list[int]()

    def tell(new: Tokens) -> None:
        if len(told) < SEEN <= len(told) + len(new.ids):
            kill(first)
        told.extend(new.ids)

    request = SampleRequest(
        session_id="s", rid="r" * 32, prompt_ids=TokenIds(PROMPT), params=PARAMS, deadline=soon(60.0)
    )
    async with asyncio.timeout(120):
        await sample(pool, sampled, tell, request)
    assert told == sampled.output_ids
    assert len(told) == TOKENS
    assert [(url, backend) for url, backend, _ in sampled.engines] == [
        (server.url, server.spec.backend) for server in (first, second)
    ]
    assert SEEN <= sampled.engines[1][2] < TOKENS
    assert [(span.version, span.start, span.end) for span in sampled.spans] == [(0, 0, TOKENS)]
    gaps = [abs(a - b) for a, b in zip(sampled.logprobs, computed(tiny_model, sampled.output_ids), strict=True)]
    assert max(gaps) < LARGEST_GAP
