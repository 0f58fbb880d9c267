"""The section `slurm`: what a run asks of Slurm."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from agentrl.configs.section import NonNegative, Positive, Section

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:@+-]*$")]


def _one_option(line: str) -> str:
    if not line.startswith("-") or not line.isprintable():
        raise ValueError(f"{line!r} is not one option of sbatch, for example --constraint=h100")
    return line


def _one_line(line: str) -> str:
    if not line.isprintable():
        raise ValueError(f"{line!r} is not one printable line")
    return line


class SlurmConfig(Section):
    """A Slurm job that holds all hosts of a run. Used with `placement: slurm`."""

    partition: Word | None = None
    """Partition; null: the cluster's default."""
    account: Word | None = None
    """Account that is charged; null: the user's default."""
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")] | None = None
    """Time limit, as `2-12:00:00`; null: the partition's. Before it ends, the job stops the run and queues itself
    again.
    """
    gpus_per_node: NonNegative = 8
    """GPUs that the run takes on each host."""
    cpus_per_node: Positive | None = None
    """CPUs that the run takes on each host; null: whole hosts, which no other job shares."""
    memory_gb_per_node: Positive | None = None
    """Memory that the run takes on each host; null: all of it on a whole host, else the partition's default."""
    nodes: Positive = 1
    """Least number of hosts for the parts. There are more where their GPUs need more."""
    spare_nodes: NonNegative = 0
    """Hosts beyond those that the parts need. They take the place of lost hosts."""
    options: list[Annotated[str, AfterValidator(_one_option)]] = Field(default_factory=list)
    """More options of sbatch, for example `--constraint=h100`."""
    setup: list[Annotated[str, AfterValidator(_one_line)]] = Field(default_factory=list)
    """Lines of shell that the job runs before it starts anything, for example `module load cuda`. No secrets: Slurm
    keeps a copy.
    """
    warning_s: Positive = 120
    """Seconds before the time limit at which the job stops the run, so that its parts can end cleanly."""
