"""Real steps whose versions are deltas: each is exactly the trainer's, and what they are made from stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loop_setup import Setup
from safetensors.torch import load_file

from agentrl.trainer.distributed import full
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run import saved_step
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.weights.published import Published
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import manifest_in
from agentrl.versions.version_sources import FolderSource

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def n_steps() -> int:
    return 7


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensors]:
    """Folder → the trained parameters as engines have them, of every version that is written."""
    found: dict[str, Tensors] = {}
    real = saved_step.write_version

    def kept(t: Trainer, folder: Path) -> Published:
        found[folder.name] = {
            name: full(p).to(torch.bfloat16 if p.ndim > 1 else p.dtype, copy=True) for name, p in t.policy.trainable()
        }
        return real(t, folder)

    monkeypatch.setattr(saved_step, "write_version", kept)
    monkeypatch.setattr(Publisher, "prepares", lambda self: True)
    return found


def test_every_version_of_a_run_is_the_trainers_and_its_ancestors_stay(
    setup: Setup, trained: dict[str, Tensors], tmp_path: Path
) -> None:
    engine = setup.config.engine.model_copy(update={"dtype": "bfloat16"})
    publish = setup.config.publish.model_copy(update={"anchor_every": 4})
    setup.config = setup.config.model_copy(update={"engine": engine, "publish": publish})
    assert setup.train(lr=1e-6)
    weights, cache = setup.config.run_dir / "weights", VersionCache(tmp_path / "cache", 1 << 30)
    kept = {path.name: manifest for path in weights.iterdir() if (manifest := manifest_in(path))}
    assert {name.split("-")[0]: manifest.whole is not None for name, manifest in kept.items()} == {
        "v5": True,
        "v6": False,
        "v7": False,
    }
    recorded = dict(setup.query("SELECT version, checksum FROM weight_versions"))
    assert {manifest.version: manifest.checksum for manifest in kept.values()}.items() <= recorded.items()
    for name, manifest in kept.items():
        with cache.whole(name, [FolderSource(weights)], manifest.checksum) as folder:
            found = load_file(folder / "model.safetensors")
        assert found.keys() == trained[name].keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in trained[name].items())
