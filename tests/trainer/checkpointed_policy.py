"""A policy that is trained and checkpointed."""

from __future__ import annotations

from pathlib import Path

import torch
from support import AGES, random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.trainer.checkpoints import checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.checkpoints.checkpoint_writer import Writing
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.update import update_policy

FACTS = TrainedBatch(step_id="s", digest="d", estimator="grpo", wasted_tokens=0, trained=[])


RECORD = StepRecord(step=1, version=1, batch=FACTS, metrics={})


CONFIG = TrainerConfig(lr=1e-2)


class Run:
    """A policy that is trained."""

    def __init__(self, model: Path, world: World) -> None:
        self.world = world
        self.policy: Policy = load_sharded(Policy, model, world.mesh)
        self.optimizer = make_optimizer(self.policy, CONFIG)

    def step(self) -> None:
        update_policy(self.policy, self.optimizer, random_samples(), 1, AGES, CONFIG, self.world)

    def begin(self, root: Path, *, copied: bool) -> Writing:
        parts = checkpoint_writer.state_of("policy", self.policy, self.optimizer)
        return checkpoint_writer.begin(root, RECORD, parts, self.world, copied=copied)

    def state(self) -> dict[str, torch.Tensor]:
        parts = checkpoint_writer.state_of("policy", self.policy, self.optimizer)
        return {f"{part}/{name}": t.detach().clone() for part, tensors in parts.items() for name, t in tensors.items()}
