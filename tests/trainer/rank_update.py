"""Run by torchrun: an update of an adapter, then one per algorithm on fixed batches; rank 0 writes weights and metrics.

torchrun … rank_update.py MODEL OUT REPLICAS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support import AGES, random_samples

from agentrl.config import LoraConfig, TrainerConfig
from agentrl.trainer.checkpoint import full
from agentrl.trainer.distributed import join_world
from agentrl.trainer.model import load_policy
from agentrl.trainer.update import make_optimizer, update_policy

ALGORITHMS = ("grpo", "dapo", "gspo", "m2po")
"""Means over sequences and over tokens, ratios of sequences, a mask of the whole minibatch."""
ADAPTER = LoraConfig(rank=3, alpha=6)


def main(model: Path, out: Path, replicas: int) -> None:
    with join_world("cpu", threads=1, replicas=replicas) as world:
        torch.manual_seed(0)
        adapted = load_policy(model, world.mesh, adapter=ADAPTER)
        config = TrainerConfig(tokens_per_microbatch=40, lr=1e-4, threads=1, lora=ADAPTER)
        metrics = [update_policy(adapted, make_optimizer(adapted, config), random_samples(9), 1, AGES, config, world)]
        policy = load_policy(model, world.mesh)
        for seed, algorithm in enumerate(ALGORITHMS):
            config = TrainerConfig(tokens_per_microbatch=40, lr=1e-4, threads=1, algorithm=algorithm, minibatches=2)
            optimizer = make_optimizer(policy, config)
            metrics.append(update_policy(policy, optimizer, random_samples(seed), 1, AGES, config, world))
        weights = {name: full(p).clone() for name, p in (*adapted.trainable(), *policy.trainable())}
        if world.leads:
            save_file(weights, out / "weights.safetensors")
            (out / "metrics.json").write_text(json.dumps(metrics))


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
