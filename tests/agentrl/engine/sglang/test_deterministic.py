"""Real SGLang, started for it, samples each call by its seed, whatever is sampled beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp
import pytest
from serving import serving

from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import Server
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.engine.sglang.sglang_command import argv, environment

PROMPTS = [[5, 6, 7, 8, 9 + n % 5] * (1 + n % 4) for n in range(24)]


def test_the_command_line_enables_determinism_without_compilation(tiny_model: Path, tmp_path: Path) -> None:
    spec = EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "e.log", deterministic=True)
    plain = EngineSpec(model=tiny_model, port=1, log_file=tmp_path / "e.log")
    assert "--enable-deterministic-inference" in argv(spec)
    assert "--enable-deterministic-inference" not in argv(plain)
    assert environment(spec)["TORCHDYNAMO_DISABLE"] == "1"


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log_file = tmp_path_factory.mktemp("deterministic") / "engine.log"
    with serving(tiny_model, log_file, max_running_requests=32, deterministic=True) as started:
        yield started


@pytest.mark.engine
@pytest.mark.long
async def test_a_seed_decides_the_tokens_alone_and_among_others(server: Server) -> None:
    async with aiohttp.ClientSession() as http, AsyncExitStack() as stack:
        client = stack.enter_context(closing(SGLangClient(server.url, http)))

        async def answer(rid: str, prompt: list[int], seed: int) -> list[int]:
            params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True, "sampling_seed": seed}
            chunks = client.generate(rid=rid, input_ids=prompt, sampling_params=params)
            return [token async for chunk in chunks for token in chunk.output_ids]

        together = await asyncio.gather(*(answer(f"a{n}", prompt, n) for n, prompt in enumerate(PROMPTS)))
        alone = [await answer(f"b{n}", prompt, n) for n, prompt in enumerate(PROMPTS)]
        assert together == alone
        assert len({tuple(ids) for ids in together}) == len(PROMPTS)
        whole = await answer("c", PROMPTS[0], 0)
        rest = await answer("d", PROMPTS[0] + whole[:10], 0)
        assert rest[:14] == whole[10:]  # what was interrupted is continued as it would have been
