"""What an engine is, and what is refused before it can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from serving import ENGINE_KEY

from agentrl.doctor.engine_examination import examine
from agentrl.engine.backends import BACKENDS
from agentrl.engine.engine_client import EngineClient
from agentrl.errors import EngineRejected
from agentrl.versions.weights_folder import ADAPTER, TENSORS

from .servers import MARKS, SERVERS, collect, marked, n_tokens

LAYER = "model.layers.0.self_attn.o_proj"


async def test_a_server_is_examined_and_ready(client: EngineClient, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["url"]
    report = await examine(client.url, ENGINE_KEY, None, 60.0)
    assert report.problems == []
    assert report.backend == SERVERS[name]
    support = BACKENDS[report.backend].support
    facts = await client.server_facts()
    assert not support.is_too_old(facts.release)
    assert facts.context_tokens == 2048
    assert report.probe is not None
    assert len(report.probe.ids) == 4
    assert report.requires_key is (name == "vllm")


@pytest.mark.parametrize("name", ["watermark", "temprature", "n"])
async def test_a_sampling_parameter_that_we_do_not_know_is_refused_by_name(client: EngineClient, name: str) -> None:
    with pytest.raises(EngineRejected, match=rf"parameter {name}\b"):
        await collect(client, {"max_new_tokens": 2, name: 1})
    assert n_tokens(await collect(client, {"max_new_tokens": 2, "ignore_eos": True})) == 2


@pytest.mark.parametrize("url", marked(*MARKS), indirect=True)
async def test_weights_of_another_model_are_refused_and_change_nothing(
    client: EngineClient, tiny_model: Path, tmp_path: Path
) -> None:
    before = await client.checksums()
    norm = load_file(tiny_model / TENSORS)["model.norm.weight"]
    wrong = {
        "no safetensors": {},
        "no tensor model.nrom.weight": {"model.norm.weight": norm + 1, "model.nrom.weight": norm},
        "has shape": {"model.norm.weight": norm[:-1] + 1},
        "has type": {"model.norm.weight": np.zeros(norm.shape, np.int32)},
    }
    for number, (message, tensors) in enumerate(wrong.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        if tensors:
            save_file(tensors, folder / TENSORS)
        with pytest.raises(EngineRejected, match=message):
            await client.update_weights_from_disk(folder, 9)
    assert await client.checksums() == before
    assert (await client.model_info()).weight_version == 0
    assert n_tokens(await collect(client, {"max_new_tokens": 2, "ignore_eos": True})) == 2


@pytest.mark.parametrize("url", marked(*MARKS), indirect=True)
async def test_an_adapter_of_another_model_is_refused(client: EngineClient, tmp_path: Path) -> None:
    pair = {f"base_model.model.{LAYER}.lora_A.weight": np.zeros((4, 7), np.float32)}
    pair[f"base_model.model.{LAYER}.lora_B.weight"] = np.zeros((9, 4), np.float32)
    save_file(pair, tmp_path / ADAPTER)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]})
    )
    with pytest.raises(EngineRejected, match=r"is for a matrix \[9, 7\], the model's is"):
        await client.load_adapter("v1-a", tmp_path)
    assert await client.adapters() == {}
