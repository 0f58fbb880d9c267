"""Run by ranks.py: an update whose second group is poisoned; every rank writes what it found.

rank_nonfinite.py MODEL OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from poison import POISONED, poisoned
from support import AGES, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.errors import NonFiniteError
from agentrl.trainer.distributed import full, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.nonfinite import NonFinite
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy


def main(model: Path, out: Path) -> None:
    with join_world("cpu", threads=1) as world:
        config = TrainerConfig(lr=1e-3)
        policy = load_sharded(Policy, model, world.mesh)
        optimizer = make_optimizer(policy, config)
        update_policy(policy, optimizer, random_samples(), 1, AGES, config, world)
        before = {name: full(p).clone() for name, p in policy.trainable()}
        found: list[NonFinite] = []
        bad = poisoned(random_samples(seed=1), POISONED)
        metrics = update_policy(policy, optimizer, bad, 1, AGES, config, world, on_nonfinite=found.append)
        after = {name: full(p) for name, p in policy.trainable()}
        stopped = ""
        try:
            update_policy(policy, optimizer, bad, 1, AGES, config, world)
        except NonFiniteError as error:
            stopped = str(error)
        (out / f"rank-{world.rank}.json").write_text(
            json.dumps(
                {
                    "named": [list(f.trajectories) for f in found],
                    "skipped": metrics["nonfinite_minibatches"],
                    "same": all(torch.equal(before[name], after[name]) for name in before),
                    "stopped": stopped,
                }
            )
        )


main(Path(sys.argv[1]), Path(sys.argv[2]))
