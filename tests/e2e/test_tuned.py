"""What `agentrl sft` and `agentrl dpo` leave behind is a model that real engines and transformers load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from sampling import ASKED, CLOSE, gaps, sampled
from serving import serving
from transformers import AutoModelForCausalLM

from agentrl.configs.config_files import validated
from agentrl.configs.tuning_config import AnyConfig, DpoConfig, SftConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.engine.server_process import Server
from agentrl.engine.sglang.sglang_client import SGLangClient
from agentrl.trainer.checkpoints import checkpoint_folders, checkpoint_reader
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.stop import Stop
from agentrl.trainer.tuning.methods import method_of
from agentrl.trainer.tuning.source import load_data
from agentrl.trainer.tuning.tuning_loop import tune

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROWS = {
    "sft": [{"prompt": asked, "completion": asked.lower()} for asked in ASKED],
    "dpo": [{"prompt": asked, "chosen": asked.upper(), "rejected": asked} for asked in ASKED],
}
KINDS: dict[str, tuple[type[SftConfig | DpoConfig], dict[str, Any]]] = {
    "sft": (SftConfig, {"lr": 1e-3}),
    "dpo": (DpoConfig, {"lr": 1e-2, "lora": {"rank": 4}}),
}


def run(kind: str, base: Path, root: Path, world: World) -> tuple[AnyConfig, Policy]:
    """Five steps from a file; the configuration and the trainer's policy after them."""
    file = root / f"{kind}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[kind]))
    which, trainer = KINDS[kind]
    data = {"name": kind, "model": str(base), "runs_dir": root, "epochs": 5, "data": {"file": file}, "trainer": trainer}
    config = validated(data, which)
    assert tune(config, base, load_data(config, base), world, Stop())
    policy = method_of(config).load(base, config, world)
    assert isinstance(policy, Policy)
    found, _ = checkpoint_folders.newest(config.run_dir / CHECKPOINTS)
    assert found is not None
    checkpoint_reader.load(found, policy, make_optimizer(policy, config.trainer), world)
    return config, policy


@pytest.fixture(scope="module")
def runs(tiny_model: Path, world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Policy]]:
    """Kind → the model's folder, and the policy that it is of."""
    root = tmp_path_factory.mktemp("runs")
    made = {kind: run(kind, tiny_model, root, world) for kind in KINDS}
    return {kind: (config.run_dir / "model", policy) for kind, (config, policy) in made.items()}


@pytest.fixture(scope="module")
def server(runs: dict[str, tuple[Path, Policy]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that was started on the imitating model."""
    log_file = tmp_path_factory.mktemp("tuned") / "engine.log"
    with serving(runs["sft"][0], log_file) as made:
        yield made


@pytest.mark.parametrize("kind", KINDS)
async def test_sglang_and_transformers_compute_what_the_trainer_does(
    kind: str, runs: dict[str, tuple[Path, Policy]], server: Server
) -> None:
    folder, policy = runs[kind]
    if kind != "sft":
        async with aiohttp.ClientSession() as http:
            await SGLangClient(server.url, http).update_weights_from_disk(folder, 1)
    found = await sampled(server.url, folder, 1.0)
    assert gaps(policy, found).mean() <= CLOSE
    others = [other for name, (_, other) in runs.items() if name != kind]
    assert all(gaps(other, found).mean() > 100 * CLOSE for other in others)
    by_transformers = by_sequence(folder, found)
    recorded = np.concatenate([t.logprobs[t.loss_mask] for t in found])
    assert np.abs(by_transformers - recorded).mean() <= CLOSE


@torch.no_grad()
def by_sequence(folder: Path, found: list[TrajectoryTokens]) -> np.ndarray[Any, Any]:
    """Logprobs of all loss tokens, one whole sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts = []
    for t in found:
        ids = torch.from_numpy(t.input_ids).long()
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(-1, ids[1:, None])[:, 0]
        parts.append(logprobs.numpy()[t.loss_mask[1:]])
    return np.concatenate(parts)
