"""Run by ranks.py: an update with replayed routing over sharded ranks, and one with the load-balancing loss.

rank_routing.py MODEL OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from mixtures import routed_samples
from steps import NO_CLIP, Run

from agentrl.trainer.distributed import join_world


def main(model: Path, out: Path) -> None:
    with join_world("cpu", threads=1) as world:
        settings = {"routing_replay": "engine", "grad_clip": NO_CLIP, "activation_checkpointing": True}
        settings |= {"tokens_per_microbatch": 40}
        found = Run(model, world, **settings).update(routed_samples())
        balanced = Run(model, world, **settings, router_aux_loss_coef=0.1).update(routed_samples())
        result = {
            "metrics": found.metrics,
            "gradients": found.gradients,
            "balanced": balanced.metrics["router_aux_loss"],
        }
        torch.save(result, out / f"rank-{world.rank}.pt")


main(Path(sys.argv[1]), Path(sys.argv[2]))
