"""Versions written from a policy, as the trainer writes them."""

from __future__ import annotations

from pathlib import Path

import torch

from agentrl.configs.publish_config import PublishConfig
from agentrl.configs.trainer_config import AdapterConfig, LoraConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.version_writer import VersionWriter


def writer(
    policy: Policy,
    base: Path,
    world: World,
    adapter: AdapterConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    compares: bool = True,
    **settings: object,
) -> VersionWriter:
    """A writer of versions of the policy; `settings` are those of `publish`."""
    config = PublishConfig(**{"bucket_bytes": 4096} | settings)
    return VersionWriter(world, base, policy.names, adapter or LoraConfig(), dtype, config, dtype if compares else None)


def version(
    policy: Policy,
    folder: Path,
    base: Path,
    world: World,
    adapter: AdapterConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Published:
    """Write one version with all tensors. Collective."""
    return writer(policy, base, world, adapter, dtype=dtype).write(folder, dict(policy.trainable()))
