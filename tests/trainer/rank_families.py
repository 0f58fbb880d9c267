"""Run by ranks.py, or alone: a step of several families. Rank 0 writes loss, gradient norms and how each was trained.

rank_families.py OUT FOLDER…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from steps import NO_CLIP, Run
from support import random_samples

from agentrl.trainer.distributed import World, join_world


def steps(folders: list[Path], world: World) -> dict[str, Any]:
    """By the folder's name."""
    found = {}
    for folder in folders:
        run = Run(folder, world, algorithm={"preset": "ppo"}, grad_clip=NO_CLIP, activation_checkpointing=True)
        step = run.step([s.tokens for s in random_samples(3, groups=2, size=2)])
        names = ("loss", "grad_norm", "value_grad_norm", "logprob_mismatch_mean_abs", "value_loss")
        found[folder.name] = {n: step.metrics[n] for n in names} | {"unpacked": run.models.policy.unpacked}
    return found


if __name__ == "__main__":
    with join_world("cpu", threads=1) as world:
        found = steps([Path(p) for p in sys.argv[2:]], world)
        if world.leads:
            Path(sys.argv[1]).write_text(json.dumps(found))
