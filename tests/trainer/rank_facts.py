"""Run by ranks.py: the facts of an update's tokens; every rank writes those that it knows in the end.

rank_facts.py MODEL OUT TENSOR CONTEXT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from support import AGES, masked_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.distributed import join_world
from agentrl.trainer.metrics.fact_collector import FactCollector
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy


def main(model: Path, out: Path, tensor: int, context: int) -> None:
    with join_world("cpu", threads=1, tensor_parallel=tensor, context_parallel=context) as world:
        config, samples = TrainerConfig(minibatches=2, lr=1e-3), masked_samples()
        policy = load_sharded(Policy, model, world.mesh)
        facts = FactCollector({sample.tokens.trajectory_id for sample in samples}, config.algorithm)
        update_policy(policy, make_optimizer(policy, config), samples, 1, AGES, config, world, token_facts=facts)
        found = facts.gathered(world)
        arrays = {f"{name} {part}": getattr(one, part) for name, one in found.items() for part in ("trained", "masked")}
        np.savez(out / f"rank-{world.rank}.npz", **arrays)


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
