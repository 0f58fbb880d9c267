"""Run by torchrun: an update on a fixed batch per algorithm, the trained weights and metrics written by rank 0.

torchrun … rank_update.py MODEL OUT REPLICAS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from support import AGES, random_samples

from agentrl.config import TrainerConfig
from agentrl.trainer.checkpoint import full
from agentrl.trainer.distributed import join_world
from agentrl.trainer.model import load_policy
from agentrl.trainer.update import make_optimizer, update_policy

ALGORITHMS = ("grpo", "dapo", "gspo", "m2po")
"""Means over sequences and over tokens, ratios of sequences, a mask of the whole minibatch."""


def main(model: Path, out: Path, replicas: int) -> None:
    with join_world("cpu", threads=1, replicas=replicas) as world:
        policy = load_policy(model, world.mesh)
        metrics = []
        for seed, algorithm in enumerate(ALGORITHMS):
            config = TrainerConfig(tokens_per_microbatch=40, lr=1e-4, threads=1, algorithm=algorithm, minibatches=2)
            optimizer = make_optimizer(policy, config)
            metrics.append(update_policy(policy, optimizer, random_samples(seed), 1, AGES, config, world))
        weights = {name: full(p).clone() for name, p in policy.trainable()}
        if world.leads:
            save_file(weights, out / "weights.safetensors")
            (out / "metrics.json").write_text(json.dumps(metrics))


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
