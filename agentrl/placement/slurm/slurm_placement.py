"""Places a run with Slurm: one job for all parts, found again by its name.

`apply` submits the whole job or nothing, as a job's script cannot change once it is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.configs.slurm_config import SlurmConfig
from agentrl.errors import ConfigError
from agentrl.files import atomic_file
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.scheduler import RunnerState
from agentrl.placement.slurm import slurm_commands
from agentrl.placement.slurm.batch_script import batch_script, job_name
from agentrl.placement.slurm.slurm_commands import Job

SCRIPT = "slurm.sh"
"""Name of the job's script in the run's folder."""


class SlurmPlacement:
    """The Slurm job of a run. `supervisor`: the command that follows the run in the job."""

    def __init__(self, run_dir: Path, supervisor: Sequence[str], config: SlurmConfig) -> None:
        self._run_dir = run_dir.resolve()
        self._supervisor = supervisor
        self._config = config
        self._name = job_name(run_dir)
        self._parts: Sequence[PartSpec] = ()

    def job(self) -> Job | None:
        """The run's job, which waits or runs."""
        return slurm_commands.find_job(self._name)

    def check(self, parts: Sequence[PartSpec]) -> None:
        """Raise UserError, in one line, when Slurm says that it can never start the job."""
        slurm_commands.check(self.script(parts))

    def apply(self, parts: Sequence[PartSpec]) -> None:
        """Submit the job unless it waits or runs already. Raises ConfigError when that job has another script."""
        self._parts = parts
        script, path = self.script(parts), self._run_dir / SCRIPT
        if (job := self.job()) is not None:
            if path.read_text() != script:
                raise ConfigError(
                    f"Slurm job {job.id} of this run was submitted with other parts or settings: restore them, "
                    f"or end it with `scancel {job.id}`"
                )
            return
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            draft.write_text(script)
        slurm_commands.submit(path)

    def states(self) -> list[RunnerState]:
        """Where the task runners are; all of them wait for the job's reason until it runs."""
        job = self.job()
        if job is None:
            return []
        running = job.state == slurm_commands.RUNNING
        hosts = slurm_commands.steps(job.id) if running else {}
        reason = "" if running else job.reason
        return [
            RunnerState(spec.name, rank, "placed", host=host)
            if (host := hosts.get(f"{spec.name}-{rank}"))
            else RunnerState(spec.name, rank, "waiting", reason=reason)
            for spec in self._parts
            for rank in range(spec.ranks)
        ]

    def remove(self, *, kill: bool = False) -> None:
        """End the job: its task runners end their commands first; with `kill`, everything at once."""
        if (job := self.job()) is None:
            return
        if kill or job.state != slurm_commands.RUNNING:
            slurm_commands.cancel(job.id)
        else:
            slurm_commands.signal_script(job.id)

    def script(self, parts: Sequence[PartSpec]) -> str:
        """The job's script, which works in this process's folder."""
        return batch_script(self._run_dir, parts, self._supervisor, self._config, work_dir=Path.cwd())
