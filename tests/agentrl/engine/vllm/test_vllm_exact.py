"""Real vLLM: logprobs of the whole distribution, stop strings, weights that change under running calls."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import closing
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import ENGINE_KEY

from agentrl.domain.schemas import Json
from agentrl.engine.engine_client import EngineClient, PauseMode
from agentrl.engine.server_process import Server
from agentrl.engine.vllm.vllm_client import VLLMClient
from agentrl.errors import EngineRejected
from agentrl.rendering import load_renderer

from .reference import Answer, ask, gap, model

pytestmark = pytest.mark.vllm
CLOSE = 1e-4
PUBLISHES = 20
IN_FLIGHT = 4
ANSWER: Json = {"max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture
async def client(vllm_engine: Server) -> AsyncIterator[VLLMClient]:
    async with aiohttp.ClientSession() as http:
        with closing(VLLMClient(vllm_engine.url, http, key=ENGINE_KEY)) as client:
            yield client


@pytest.fixture(scope="module")
def base(tiny_model: Path) -> Any:
    return model(tiny_model)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize(
    "restricted", [{}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 20, "min_p": 0.01}]
)
async def test_logprobs_are_of_the_whole_distribution(
    client: VLLMClient, base: Any, temperature: float, restricted: Json
) -> None:
    others = [ask(client, ANSWER | {"temperature": t}) for t in (0.0, 1.0)]  # in one batch
    answer, *_ = await asyncio.gather(ask(client, ANSWER | restricted | {"temperature": temperature}), *others)
    assert gap(base, answer) < CLOSE


async def test_equal_seeds_sample_equal_tokens(client: VLLMClient) -> None:
    first, again, other = [await ask(client, ANSWER | {"sampling_seed": seed}) for seed in (-1, -1, 5)]
    assert first.ids == again.ids != other.ids


async def test_a_stop_string_ends_an_answer_with_the_token_that_completes_it(client: VLLMClient, base: Any) -> None:
    free = await ask(client, ANSWER | {"temperature": 0.0})
    text = load_renderer(Path(base.config._name_or_path)).decode(free.ids)
    stop = text[2:4]
    found = await ask(client, ANSWER | {"temperature": 0.0, "stop": [stop]})
    assert (found.reason, found.stop) == ("stop", stop)
    assert found.ids == free.ids[: len(found.ids)]
    assert len(found.ids) < len(free.ids)
    assert gap(base, found) < CLOSE


async def test_a_bias_is_part_of_the_distribution(client: VLLMClient) -> None:
    found = await ask(client, {"max_new_tokens": 4, "ignore_eos": True, "logit_bias": {"70": 100.0}})
    assert found.ids == [70] * 4
    assert max(map(abs, found.logprobs)) < CLOSE


def versions(tiny_model: Path, root: Path) -> list[Path]:
    """Folders of versions: all tensors differ a little from those of the version before."""
    tensors, folders = load_file(tiny_model / "model.safetensors"), []
    generator = torch.Generator().manual_seed(23)
    for version in range(1, PUBLISHES + 1):
        for name, tensor in tensors.items():
            tensors[name] = tensor + 0.05 * tensor.std().nan_to_num(1.0) * torch.randn(
                tensor.shape, generator=generator
            )
        folder = root / f"v{version}-a"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        folders.append(folder)
    return folders


async def publish(client: EngineClient, folder: Path, version: int, mode: PauseMode) -> None:
    await client.pause(mode)
    await client.update_weights_from_disk(folder, version, flush_cache=mode != "in_place")
    await client.continue_generation()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_every_token_has_the_version_that_sampled_it(
    client: VLLMClient, base: Any, tiny_model: Path, tmp_path: Path, mode: PauseMode
) -> None:
    answers: list[Answer] = []

    async def play(temperature: float) -> None:
        while True:
            answers.append(await ask(client, ANSWER | {"temperature": temperature}))

    players = [asyncio.create_task(play(temperature)) for temperature in [1.0, 0.7] * (IN_FLIGHT // 2)]
    folders = versions(tiny_model, tmp_path)
    for version, folder in zip(count(1), folders):
        seen = len(answers)
        await asyncio.sleep(0.05)
        await publish(client, folder, version, mode)
        while len(answers) < seen + 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for player in players:
        player.cancel()
    await asyncio.gather(*players, return_exceptions=True)

    reference = [base, *(_changed(tiny_model, folder) for folder in folders)]
    mixed = [answer for answer in answers if len(answer.spans) > 1]
    assert bool(mixed) == (mode != "abort")
    assert {span.version for answer in answers for span in answer.spans} >= set(range(1, PUBLISHES))
    for answer in answers:
        borders = [0, *(span.end for span in answer.spans)]
        assert [span.start for span in answer.spans] == borders[:-1]
        assert borders[-1] == len(answer.ids) == len(answer.logprobs)
        assert all(older.version < newer.version for older, newer in pairwise(answer.spans))
        exact = answer.spans if mode == "retract" else answer.spans[:1]  # in place, old keys and values are used on
        for span in exact:
            assert gap(reference[span.version], answer, span.start, span.end) < CLOSE


def _changed(tiny_model: Path, folder: Path) -> Any:
    changed = model(tiny_model)
    changed.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return changed


async def test_digests_are_those_of_the_files(client: VLLMClient, tiny_model: Path, tmp_path: Path) -> None:
    folder = versions(tiny_model, tmp_path)[0]
    await publish(client, folder, 1, "retract")
    (found,) = await client.checksums()
    tensors = load_file(folder / "model.safetensors")
    expected = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in tensors.items()}
    assert expected.items() <= found.items()


@pytest.mark.parametrize("change", ["shape", "name", "none"])
async def test_a_checkpoint_that_is_not_the_models_is_refused_and_changes_nothing(
    client: VLLMClient, tiny_model: Path, tmp_path: Path, change: str
) -> None:
    before = await client.checksums()
    tensors = load_file(tiny_model / "model.safetensors")
    if change == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:8].clone()
    elif change == "name":
        tensors["model.nrom.weight"] = tensors["model.norm.weight"].clone()
    else:
        tensors = {}
    if tensors:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    said = {"shape": "model.norm.weight has shape", "name": "no tensor model.nrom.weight", "none": "no safetensors"}
    with pytest.raises(EngineRejected, match=said[change]):
        await client.update_weights_from_disk(tmp_path, 5)
    assert await client.checksums() == before
    assert (await client.model_info()).version == "0"
    assert not await client.paused()
