"""`agentrl sft`, `agentrl dpo`, `agentrl reward-model`: train on existing data without rollouts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.train import INTERRUPTED_STATUS
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.configs.tuning_config import AnyConfig

Config = Annotated[Path, typer.Argument(help="The tuning run's YAML file (docs/tuning.md).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. trainer.lr=1e-5 epochs=2.")]


def sft(config: Config, overrides: Overrides = None) -> None:
    """Fine-tune on the assistant turns of conversations, from a file or a run's best trajectories. Resumes a stopped
    run.
    """
    from agentrl.configs.tuning_config import SftConfig, load

    _tune(load(config, overrides, SftConfig))


def dpo(config: Config, overrides: Overrides = None) -> None:
    """Train on preference pairs, from a file or a run's groups ordered by reward (DPO). Resumes a stopped run."""
    from agentrl.configs.tuning_config import DpoConfig, load

    _tune(load(config, overrides, DpoConfig))


def reward_model(config: Config, overrides: Overrides = None) -> None:
    """Train a reward model on preference pairs (Bradley-Terry). Resumes a stopped run."""
    from agentrl.configs.tuning_config import RewardModelConfig, load

    _tune(load(config, overrides, RewardModelConfig))


def _tune(config: AnyConfig) -> None:
    from agentrl.models import resolve_model
    from agentrl.trainer.tuning.source import load_data

    model = resolve_model(config.model)
    first = "RANK" not in os.environ  # load the data before torchrun, which hides the exit status of UserError
    data = load_data(config, model) if first or os.environ["RANK"] == "0" else None
    if first:
        assert data is not None
        for note in (f"{len(data.train)} training items, {len(data.held_out)} held out", *data.notes):
            say(note)
        if config.resources.trainer.ranks > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launcher.append(f"--nproc-per-node={config.resources.trainer.ranks}")
            os.execv(sys.executable, [*launcher, "-m", "agentrl", *sys.argv[1:]])

    from agentrl.cli.progress_bar import bar
    from agentrl.configs import tuning_config
    from agentrl.launch.run_folder import locked
    from agentrl.trainer.distributed import join_world
    from agentrl.trainer.stop import Stop
    from agentrl.trainer.tuning.tuning_loop import tune

    stop = Stop()
    stop.install()
    ranks = config.resources.trainer
    groups = (ranks.replicas, ranks.tensor, ranks.context, ranks.experts)
    with join_world(config.trainer.device, config.trainer.threads, *groups) as world:
        if world.leads:
            with locked(config.run_dir), bar(config.method) as progress:
                tuning_config.keep(config)
                finished = tune(config, model, world.share(data), world, stop, progress)
        else:
            finished = tune(config, model, world.share(data), world, stop)
    if not finished:
        raise typer.Exit(INTERRUPTED_STATUS)
