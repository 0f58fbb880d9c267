"""`agentrl trainer`: trains the policy on a run's batches, in one process or several."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import AgentRLError, ConfigError, FencedError
from agentrl.visible import say

if TYPE_CHECKING:
    from agentrl.configs.resources_config import TrainerResources
    from agentrl.configs.run_config import RunConfig

FENCED_STATUS = 3
"""Exit status of a trainer that a newer trainer has fenced off."""


def trainer(
    config: Annotated[Path, typer.Option(help="The run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for `agentrl train`.")] = None,
    from_base: Annotated[
        bool,
        typer.Option("--from-base", help="Without a usable checkpoint, train all steps again from the base model."),
    ] = False,
    host_rank: Annotated[
        int, typer.Option(min=0, help="Number of this host, from 0, with resources.trainer.hosts above 1.")
    ] = 0,
    leader: Annotated[
        str | None, typer.Option(help="HOST:PORT of host 0, where the ranks of all hosts meet.", show_default=False)
    ] = None,
) -> None:
    """Lease batches from the store, train, write checkpoints, and publish the weights through the proxy.

    Starts torchrun when resources.trainer.ranks is more than one, with this host's share of the ranks. Needs
    AGENTRL_PROXY_URL and AGENTRL_ADMIN_KEY. A run that has lost its checkpoints needs --from-base to start over. Exit
    status 3 means that a newer trainer of the same run has started.
    """
    from agentrl.configs.config_files import load_config
    from agentrl.trainer.metrics import metric_sinks

    run = load_config(config, overrides)
    metric_sinks.require(run.metrics)
    if "RANK" not in os.environ:  # before torchrun, so that each caution is printed once
        for caution in run.cautions:
            say(caution, err=True)
    url, key = _required("AGENTRL_PROXY_URL"), _required("AGENTRL_ADMIN_KEY")
    if (
        "RANK" not in os.environ and host_rank == 0
    ):  # before this trainer fences another; torchrun would also hide the exit status
        _check_resume(run, from_base)
    if run.resources.trainer.ranks > 1 and "RANK" not in os.environ:
        ours = ["-m", "agentrl", "trainer", "--config", str(config), *(overrides or [])]
        ours += ["--from-base"] if from_base else []
        os.execv(sys.executable, [sys.executable, *_torchrun(run.resources.trainer, host_rank, leader), *ours])

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep instead of taking cores from the engines

    from agentrl.launch.run_folder import database_url
    from agentrl.models import resolve_model
    from agentrl.store import Database
    from agentrl.trainer.distributed import join_world
    from agentrl.trainer.loop import train
    from agentrl.trainer.publish.publish_client import Publisher
    from agentrl.trainer.run.trainer_start import compared_dtype
    from agentrl.trainer.run_lineage import Lineage
    from agentrl.trainer.stop import Stop
    from agentrl.trainer.stored_lineage import StoredLineage, reading_lineage
    from agentrl.trainer.torchrun import told
    from agentrl.trainer.training_run import opened
    from agentrl.trainer.user_script import run_script

    stop = Stop()
    stop.install()
    model = resolve_model(run.model)
    ranks = run.resources.trainer
    groups = (ranks.replicas, ranks.tensor, ranks.context, ranks.experts)
    with told(), join_world(run.trainer.device, run.trainer.threads, *groups) as world:

        def trained(lineage: Lineage, publisher: Publisher | None) -> bool:
            if run.trainer.script is None:
                return train(run, model, world, lineage, publisher, stop, from_base=from_base)
            opens = partial(opened, run, model, world, lineage, publisher, stop, from_base=from_base)
            return run_script(run.trainer.script, opens)

        database = Database(database_url(run))
        try:
            if not world.leads:
                trained(reading_lineage(database, run), None)
                return
            if run.publish.verify and compared_dtype(run, world.device) is None:
                say("publish.verify has no effect: the trainer can compute weight digests only for engines on a CPU")
            publisher = Publisher(url.rstrip("/"), key, stop.wait, config=run.publish, device=world.device)
            lineage = StoredLineage.begin(database, run)
            finished = trained(lineage, publisher)
            if not finished and (why := lineage.failure()) is not None:
                raise AgentRLError(why)
        except FencedError as error:
            say(f"agentrl trainer: {error}", err=True)
            raise typer.Exit(FENCED_STATUS) from None
        finally:
            database.close()


def _torchrun(size: TrainerResources, host_rank: int, leader: str | None) -> list[str]:
    """The arguments that start this host's ranks. Raises ConfigError for a host that is not one of the trainer's."""
    launcher = ["-m", "agentrl.trainer.torchrun", f"--nproc-per-node={size.ranks // size.hosts}"]
    if size.hosts == 1:
        return [*launcher, "--standalone"]
    if host_rank >= size.hosts:
        raise ConfigError(f"--host-rank {host_rank}: resources.trainer.hosts is {size.hosts}, numbered from 0")
    host, _, port = (leader or "").rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"resources.trainer.hosts is {size.hosts}: give --leader HOST:PORT, the same on every host")
    meeting = [f"--nnodes={size.hosts}", f"--node-rank={host_rank}", f"--master-addr={host}", f"--master-port={port}"]
    return [*launcher, *meeting, "--max-restarts=0"]


def _check_resume(run: RunConfig, from_base: bool) -> None:
    """Raise UserError when the run cannot resume from a checkpoint. Leaves a running trainer undisturbed."""
    from agentrl.launch.run_folder import database_url
    from agentrl.store import Database
    from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS
    from agentrl.trainer.checkpoints.stored_checkpoints import can_fetch
    from agentrl.trainer.run.resume import find_checkpoint
    from agentrl.trainer.stored_lineage import StoredLineage

    database = Database(database_url(run))
    try:
        lineage = StoredLineage.of(database, run)
        if not can_fetch(run, run.run_dir / CHECKPOINTS, lineage.survives):
            find_checkpoint(run, lineage, from_base=from_base)
    finally:
        database.close()


def _required(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set: the trainer publishes weights through the proxy")
    return value
