"""Run by ranks.py: writes versions from sharded models; every rank also measures its memory. rank_versions.py OUT CASE…

A case is REPLICAS-TENSOR-CONTEXT-EXPERTS:FOLDER:KIND. It writes OUT/LAYOUT/NAME/KIND/v1-a, v2-a (few elements differ)
and v3-a (all do), model/, and facts.json: what the writer says, and the peak bytes of each rank while it writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layouts import Layout
from live_bytes import LiveBytes
from version_setup import writer

from agentrl.configs.trainer_config import LoraConfig
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.rank_parts import owned
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.weights.model_export import export

ADAPTER = LoraConfig(rank=3, alpha=6)
KINDS: dict[str, tuple[torch.dtype, LoraConfig | None]] = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "adapter": (torch.bfloat16, ADAPTER),
}
BUCKET_BYTES = 131072
SMALL_BUCKET_BYTES = 16384
WIDE = "wide"
"""The model whose memory is measured: its embedding is larger than several buckets."""


@torch.no_grad()
def move(policy: Policy, seed: int, every: int) -> None:
    """Add noise to each `every`-th element of every parameter; the same elements and noise on any number of ranks."""
    for number, (_, p) in enumerate(policy.trainable()):
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * seed + number))
        chosen = (torch.arange(whole.numel()) % every == 0).reshape(whole.shape)
        local, part = owned(p)
        local += 0.05 * (whole * chosen)[part]


def versions(folder: Path, kind: str, out: Path, world: World) -> None:
    """Write the versions of a case."""
    dtype, adapter = KINDS[kind]
    torch.manual_seed(0)  # of the adapter
    policy = load_sharded(Policy, folder, world.mesh, adapter=adapter)
    size = BUCKET_BYTES if folder.name == WIDE else SMALL_BUCKET_BYTES
    made = writer(policy, folder, world, adapter, dtype=dtype, bucket_bytes=size, delta="always")
    facts: list[dict[str, Any]] = []
    for number, every in ((1, 3), (2, 50), (3, 1)):
        move(policy, number, every)
        parameters = dict(policy.trainable())
        with LiveBytes(parameters.values()) as live:
            published = made.write(out / f"v{number}-a", parameters, lambda: True)
        share = sum(owned(p)[0].nbytes for p in parameters.values())
        if number == 3:  # all files are written from the held share, which the main thread then sees
            share += sum(unit.nbytes for unit in made.stream(parameters, range(world.size)).shares[world.rank])
        facts.append(
            {
                "checksum": published.checksum,
                "digests": dict(published.digests),
                "metrics": published.metrics,
                "parent": published.parent,
                "above_share": world.everyones(live.peak - share),
            }
        )
    export(out, policy, folder, adapter or LoraConfig(), world)
    if world.leads:
        (out / "facts.json").write_text(json.dumps(facts))


def main(out: Path, cases: list[str]) -> None:
    with join_world("cpu", threads=1) as world:
        for case in cases:
            layout, folder, kind = case.split(":")
            there = out / layout / Path(folder).name / kind
            versions(Path(folder), kind, there, Layout.read(layout).of(world))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
