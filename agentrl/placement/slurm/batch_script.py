"""Renders the script of a run's Slurm job: one step for each process, started again until it ends with status 0.

The script holds no secrets: task runners read them from the run's folder. It needs bash 4 and `flock`.

    the job starts             the supervisor; when it says that they may, the steps of all parts
    supervisor ends with 0     the parts are stopped: their steps end by themselves, then the job does
    supervisor ends with 2     the run failed: the steps are ended, the job fails
    a step ends otherwise      it is started again, on a spare host if the job has lost its own
    the time limit is near     the steps are ended, the job is queued again
    the script's host is lost  a step on another host queues the job again
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from agentrl.configs.slurm_config import SlurmConfig
from agentrl.errors import ConfigError
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.scheduler import runner_command
from agentrl.placement.slurm.slots import Placed, slots_of

PAUSE_S = 5
"""Seconds before a step is started again."""
WATCH_S = 20
"""Seconds between looks for the script's host."""
STOP_S = 60
"""Seconds before a step that is to end is asked again."""
FUNCTIONS = Path(__file__).parent / "batch_functions.sh"


def job_name(run_dir: Path) -> str:
    """The name of a run's job, by which it is found again. It differs for runs of one name in two folders."""
    folder = run_dir.resolve()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name)
    return f"agentrl-{name}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def batch_script(
    run_dir: Path,
    parts: Sequence[PartSpec],
    supervisor: Sequence[str],
    config: SlurmConfig,
    *,
    work_dir: Path,
    pause_s: int = PAUSE_S,
    watch_s: int = WATCH_S,
    stop_s: int = STOP_S,
) -> str:
    """The job's script. `supervisor` is the command that follows the run until it is finished, without secrets.

    Raises ConfigError when a part does not fit on a host, or a path cannot be written into the script.
    """
    for path in (run_dir, work_dir):
        if not str(path).isprintable():
            raise ConfigError(f"{str(path)!r} has characters that a script of Slurm cannot hold")
    placed = slots_of(parts, config.gpus_per_node, config.nodes)
    slots = max([config.nodes, *(process.slot + 1 for process in placed)])
    nodes = slots + config.spare_nodes
    numbers = {"nodes": nodes, "slots": slots, "gpus_per_node": config.gpus_per_node}
    numbers |= {"pause_s": pause_s, "watch_s": watch_s, "stop_s": stop_s}
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(run_dir, nodes, config)),
        "",
        f"# Written by agentrl: {len(placed)} processes of the run {run_dir.name} on {slots} hosts.",
        *config.setup,
        f"cd -- {shlex.quote(str(work_dir))} || exit 1",
        *(f"{name}={value}" for name, value in numbers.items()),
        "",
        FUNCTIONS.read_text(),
        "assign_slots",
        *(_step(run_dir, process) for process in placed),
        f"supervise {shlex.join(supervisor)} &",
        "finish",
    ]
    return "\n".join(lines) + "\n"


def _step(run_dir: Path, process: Placed) -> str:
    """The line that starts a process: its name, slot and GPUs, and its runner's command."""
    spec = process.spec
    command = shlex.join(runner_command(run_dir.resolve(), spec.name, process.rank))
    return f"keep {spec.name}-{process.rank} {process.slot} {spec.need.gpus} {command} &"


def _options(run_dir: Path, nodes: int, config: SlurmConfig) -> list[str]:
    """The options of sbatch. Those of the user come last, so that they win."""
    options = [
        f"--job-name={job_name(run_dir)}",
        f"--nodes={nodes}",
        f"--output={_quoted(run_dir.resolve() / 'logs' / 'slurm.log')}",
        "--open-mode=append",
        "--dependency=singleton",
        "--requeue",
        "--no-kill",
        "--export=NIL",
        f"--signal=B:USR1@{config.warning_s}",
    ]
    if config.gpus_per_node:
        options.append(f"--gres=gpu:{config.gpus_per_node}")
    if config.cpus_per_node is None:
        options.append("--exclusive")
    else:
        options += ["--ntasks-per-node=1", f"--cpus-per-task={config.cpus_per_node}"]
    if config.memory_gb_per_node is not None:
        options.append(f"--mem={config.memory_gb_per_node}G")
    elif config.cpus_per_node is None:
        options.append("--mem=0")
    named = {"partition": config.partition, "account": config.account, "time": config.time}
    return [*options, *(f"--{name}={value}" for name, value in named.items() if value is not None), *config.options]


def _quoted(path: Path) -> str:
    """A path in a line of options: without the patterns of sbatch, and in quotes."""
    return '"' + str(path).replace("%", "%%").replace("\\", "\\\\").replace('"', '\\"') + '"'
