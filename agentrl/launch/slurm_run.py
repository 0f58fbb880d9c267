"""A run in a Slurm job, seen from a login node: submits the job and follows it. The job holds the run's supervisor.

    folder, secrets ──► sbatch ──► follow queue and database until the job has ended

The job runs without this process: on Ctrl-C it goes on, and the same command finds it again by its name.
"""

from __future__ import annotations

import sys
import time

from agentrl.configs.run_config import RunConfig
from agentrl.console import Console
from agentrl.domain.schemas import Json
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launch import run_folder, run_lifecycle
from agentrl.launch.placed_run import parts_of, secrets_of
from agentrl.launch.run_lifecycle import POLL_S, Stopped
from agentrl.launch.views import snapshot
from agentrl.launch.views.live_panel import Display
from agentrl.placement.run_secrets import adopt_storage, write_secrets
from agentrl.placement.slurm.slurm_placement import SlurmPlacement
from agentrl.store import Database, runs

ASK_S = 10.0
"""Seconds between questions to Slurm, whose controller serves all users."""
CONFIG = "config.yaml"


def train(config: RunConfig, console: Console, *, from_base: bool = False) -> Json:
    """Submit the run's job, or find it, and follow it to its end; returns the summary. Raises UserError and Stopped."""
    run_lifecycle.check_trainable(config)
    adopt_storage(config.run_dir)
    specs = parts_of(config, from_base)
    placement = placement_of(config, from_base)
    database_url = run_folder.database_url(config)
    database = Database(database_url)
    try:
        run_lifecycle.check_database(config, database)
        if (job := placement.job()) is None:
            with run_folder.locked(config.run_dir):
                run_lifecycle.check_agent(config)
                placement.check(specs)
                database.upgrade()
                run_folder.write_config(config, config.run_dir / CONFIG)
                run_folder.remember_database(config.run_dir, database_url)
                write_secrets(config.run_dir, secrets_of(config, database_url))
        elif not run_folder.is_written(config, config.run_dir / CONFIG):
            raise ConfigError(f"Slurm job {job.id} runs {config.name} with another configuration: end it first")
        placement.apply(specs)
        with Display(config, console) as display:
            _follow(config, database, placement, display)
        return run_lifecycle.report(config, database, database.query(runs.by_name, config.name).id)
    finally:
        database.close()


def placement_of(config: RunConfig, from_base: bool = False) -> SlurmPlacement:
    """The Slurm job of a run, with its supervisor's command."""
    supervisor = [sys.executable, "-m", "agentrl", "train", str((config.run_dir / CONFIG).resolve())]
    return SlurmPlacement(config.run_dir, supervisor + ["--from-base"] * from_base, config.slurm)


def _follow(config: RunConfig, database: Database, placement: SlurmPlacement, display: Display) -> None:
    """Show the job's state, then the run's, until the job has ended. Raises AgentRLError for a run without its end."""
    job, asked_at, said = placement.job(), time.monotonic(), ""
    try:
        while job is not None:
            if (line := f"Slurm job {job.id} is {job.state.lower()}" + f" ({job.reason})" * job.waits) != said:
                display.note(said := line)
            run = database.query(runs.find, config.name)
            if run is not None and run.status == "running":
                display.update(database.query(snapshot.take, run.id, display.shown_step))
            time.sleep(POLL_S)
            if time.monotonic() - asked_at > ASK_S:
                job, asked_at = placement.job(), time.monotonic()
    except KeyboardInterrupt:
        raise Stopped(
            f"the Slurm job goes on: the same command follows it, `scancel {job and job.id}` ends it"
        ) from None
    run = database.query(runs.find, config.name)
    if run is None or run.status != "finished":
        why = "it never started" if run is None else run.error or run.status
        raise AgentRLError(f"the Slurm job has ended before the run: {why} ({config.run_dir / 'logs' / 'slurm.log'})")
