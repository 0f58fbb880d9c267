"""`agentrl sft`, `agentrl dpo`, `agentrl reward-model`: learn from data that are there, without a rollout."""

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

Config = Annotated[Path, typer.Argument(help="The YAML file (docs/tuning.md).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, e.g. trainer.lr=1e-5 epochs=2.")]


def sft(config: Config, overrides: Overrides = None) -> None:
    """Imitate the assistant's turns of conversations: of a file, or the best of a run. Resumes a stopped run."""
    from agentrl.configs.tuning_config import SftConfig, load

    _tune(load(config, overrides, SftConfig))


def dpo(config: Config, overrides: Overrides = None) -> None:
    """Prefer the chosen of two answers: pairs of a file, or of a run's groups by reward. Resumes a stopped run."""
    from agentrl.configs.tuning_config import DpoConfig, load

    _tune(load(config, overrides, DpoConfig))


def reward_model(config: Config, overrides: Overrides = None) -> None:
    """Learn a reward from pairs of answers (Bradley-Terry). Resumes a stopped run."""
    from agentrl.configs.tuning_config import RewardModelConfig, load

    _tune(load(config, overrides, RewardModelConfig))


def _tune(config: AnyConfig) -> None:
    from agentrl.models import resolve_model
    from agentrl.trainer.tuning.source import load_data

    model = resolve_model(config.model)
    first = "RANK" not in os.environ  # not one of torchrun's processes, which would hide mistakes in the data
    data = load_data(config, model) if first or os.environ["RANK"] == "0" else None
    if first:
        assert data is not None
        for note in (f"{len(data.train)} items to train, {len(data.held_out)} held out", *data.notes):
            say(note)
        if config.trainer.ranks > 1:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            launcher.append(f"--nproc-per-node={config.trainer.ranks}")
            os.execv(sys.executable, [*launcher, "-m", "agentrl", *sys.argv[1:]])

    from agentrl.cli.progress_bar import bar
    from agentrl.configs import tuning_config
    from agentrl.launch.run_folder import locked
    from agentrl.trainer.distributed import join_world
    from agentrl.trainer.stop import Stop
    from agentrl.trainer.tuning.tuning_loop import tune

    stop = Stop()
    stop.install()
    ranks = config.trainer
    with join_world(ranks.device, ranks.threads, ranks.replicas, ranks.tensor_parallel) as world:
        if world.leads:
            with locked(config.run_dir), bar(config.method) as progress:
                tuning_config.keep(config)
                finished = tune(config, model, world.share(data), world, stop, progress)
        else:
            finished = tune(config, model, world.share(data), world, stop)
    if not finished:
        raise typer.Exit(INTERRUPTED_STATUS)
