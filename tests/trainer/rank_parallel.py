"""Run by ranks.py: PPO with a reference and a critic on fixed batches; rank 0 writes losses and gradients.

rank_parallel.py OUT REPLICAS-TENSOR-CONTEXT-EXPERTS:FOLDER:KIND…
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from layouts import Found, Layout
from safetensors.torch import save_file
from support import AGES, random_samples

from agentrl.configs.trainer_config import LoraConfig, TrainerConfig
from agentrl.domain.schemas import TrainedBatch
from agentrl.trainer.checkpoints import checkpoint_writer
from agentrl.trainer.checkpoints.checkpoint import StepRecord
from agentrl.trainer.distributed import World, full, join_world
from agentrl.trainer.models import run_models
from agentrl.trainer.models.policy import Body
from agentrl.trainer.models.run_models import Models, make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.update import update_policy

CONFIGS = {
    name: TrainerConfig(
        lr=1e-4, tokens_per_microbatch=60, grad_clip=1e9, algorithm={"preset": "ppo", "kl_coef": 0.1}, **settings
    )
    for name, settings in {
        "full": {"activation_checkpointing": True},
        "adapter": {"lora": LoraConfig(rank=3, alpha=6)},
        "top": {"train_layers": 1, "keep_gathered": True},
    }.items()
}


def updates(made: Models, optimizer: torch.optim.Optimizer, config: TrainerConfig, seed: int, world: World) -> Found:
    """Loss, norms and gradients of policy and critic in one step."""
    found: Found = {}
    assert made.critic is not None

    def watch(name: str, model: Body) -> None:
        found.update({f"{name}/{n}": full(p.grad).clone() for n, p in model.trainable() if p.grad is not None})

    hooks = [
        optimizer.register_step_pre_hook(lambda *_: watch("policy", made.policy)),
        made.critic.optimizer.register_step_pre_hook(lambda *_: watch("critic", made.critic.critic)),
    ]
    trajectories = [s.tokens for s in random_samples(seed, groups=2, size=3)]
    samples = make_samples(trajectories, config.algorithm, made, config.token_budget, world)
    metrics = update_policy(made.policy, optimizer, samples, 1, AGES, config, world, made.critic)
    for hook in hooks:
        hook.remove()
    names = ("loss", "grad_norm", "entropy", "value_loss", "value_grad_norm", "tokens_trained")
    return found | {f"metrics/{name}": torch.tensor([metrics[name]], dtype=torch.float64) for name in names}


def start(folder: Path, config: TrainerConfig, world: World) -> tuple[Models, torch.optim.Optimizer]:
    torch.manual_seed(0)
    made = make_models(folder, config, world)
    return made, make_optimizer(made.policy, config)


def measured(folder: Path, kind: str, out: Path, world: World) -> Found:
    """A step; and for a kind with `+` a checkpoint of it in `out`, and the next step: what a run that goes on from
    there should make.
    """
    config = CONFIGS[kind.rstrip("+")]
    made, optimizer = start(folder, config, world)
    found = {f"1/{name}": tensor for name, tensor in updates(made, optimizer, config, 1, world).items()}
    if not kind.endswith("+"):
        return found
    batch = TrainedBatch(step_id=kind, digest="d", estimator="ppo", wasted_tokens=0, trained=[])
    record = StepRecord(step=1, version=1, batch=batch, metrics={})
    checkpoint_writer.begin(out, record, run_models.parts(made, optimizer, config), world, copied=False).finish()
    return found | {f"2/{name}": tensor for name, tensor in updates(made, optimizer, config, 2, world).items()}


def main(out: Path, cases: list[str]) -> None:
    with join_world("cpu", threads=1) as world:
        for layout, folder, kind in (case.split(":") for case in cases):
            beside = out / layout / Path(folder).name
            found = measured(Path(folder), kind, beside, Layout.read(layout).of(world))
            if world.leads:
                beside.mkdir(parents=True, exist_ok=True)
                save_file(found, beside / f"{kind}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
