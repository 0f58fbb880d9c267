"""Run by ranks.py: an update with replayed routing over sharded ranks, and one with the load-balancing loss.

rank_routing.py MODEL OUT GROUP, the group of both ranks: replica, context or experts
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch
from mixtures import routed_samples
from steps import NO_CLIP, Run

from agentrl.trainer.distributed import join_world
from agentrl.trainer.experts.load_balancing import load_metrics
from agentrl.trainer.metrics import step_stats


def main(model: Path, out: Path, group: str) -> None:
    sizes = {"context": {"context_parallel": 2}, "experts": {"experts": 2}}.get(group, {})
    with join_world("cpu", threads=1, **sizes) as world:
        settings = {"routing_replay": "engine", "grad_clip": NO_CLIP, "activation_checkpointing": True}
        settings |= {"tokens_per_microbatch": 40}
        loads: list[torch.Tensor] = []

        def keep(loads_RE: torch.Tensor) -> dict[str, float]:
            loads.append(loads_RE)
            return load_metrics(loads_RE)

        with patch.object(step_stats, "load_metrics", keep):
            found = Run(model, world, **settings).update(routed_samples())
        balanced = Run(model, world, **settings, router_aux_loss_coef=0.1).update(routed_samples())
        result = {
            "metrics": found.metrics,
            "gradients": found.gradients,
            "loads": int(loads[0].sum()),
            "balanced": balanced.metrics["router_aux_loss"],
        }
        torch.save(result, out / f"rank-{world.rank}.pt")


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
