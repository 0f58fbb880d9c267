"""Run by torchrun: an update of an adapter, then one per algorithm on fixed batches; rank 0 writes weights and metrics.

torchrun … rank_update.py MODEL OUT REPLICAS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support import AGES, random_samples

from agentrl.config import LoraConfig, TrainerConfig
from agentrl.trainer.checkpoint import full
from agentrl.trainer.distributed import join_world
from agentrl.trainer.model import load_policy
from agentrl.trainer.models import make_models
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import make_optimizer, update_policy

ALGORITHMS: tuple[Any, ...] = (
    "grpo", "dapo", "gspo", "m2po", {"preset": "rloo", "kl_coef": 0.1}, {"preset": "grpo", "kl_coef": 0.1},
    {"preset": "ppo", "kl_coef": 0.1},
)  # fmt: skip
"""Means over sequences and over tokens, ratios of sequences, a mask of the whole minibatch, KL in reward and loss, a
critic."""
ADAPTER = LoraConfig(rank=3, alpha=6)


def main(model: Path, out: Path, replicas: int) -> None:
    with join_world("cpu", threads=1, replicas=replicas) as world:
        torch.manual_seed(0)
        adapted = load_policy(model, world.mesh, adapter=ADAPTER)
        config = TrainerConfig(tokens_per_microbatch=40, lr=1e-4, threads=1, lora=ADAPTER)
        metrics = [update_policy(adapted, make_optimizer(adapted, config), random_samples(9), 1, AGES, config, world)]
        parts: Any = {"tokens_per_microbatch": 40, "lr": 1e-4, "critic_lr": 1e-3, "threads": 1, "minibatches": 2}
        models = make_models(model, TrainerConfig(algorithm=ALGORITHMS[-1], **parts), world)
        policy, learner = models.policy, models.critic
        assert learner is not None
        for seed, algorithm in enumerate(ALGORITHMS):
            config = TrainerConfig(algorithm=algorithm, **parts)
            optimizer = make_optimizer(policy, config)
            samples = random_samples(seed)
            has_critic = config.algorithm.needs_critic
            for _ in range(2 if has_critic else 1):  # a new critic says 0
                if has_critic or config.algorithm.needs_reference:
                    trajectories = [s.tokens for s in samples]
                    samples = make_samples(trajectories, config.algorithm, models, config.tokens_per_microbatch, world)
                done = update_policy(
                    policy, optimizer, samples, 1, AGES, config, world, learner if has_critic else None
                )
            metrics.append(done)
        weights = {name: full(p).clone() for name, p in (*adapted.trainable(), *policy.trainable())}
        weights |= {f"critic.{name}": full(p).clone() for name, p in learner.critic.trainable()}
        if world.leads:
            save_file(weights, out / "weights.safetensors")
            (out / "metrics.json").write_text(json.dumps(metrics))


main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
