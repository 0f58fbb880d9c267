"""Slurm's commands, as functions. A command that fails raises UserError with the last line that it printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.environment import without_secrets
from agentrl.errors import UserError

TIMEOUT_S = 60.0
ENDING = "COMPLETING"
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class Job:
    """A job of the queue. `reason`: why it waits."""

    id: str
    state: str
    reason: str

    @property
    def waits(self) -> bool:
        """Whether the job has no hosts yet."""
        return self.state == "PENDING"


def check(script: str) -> None:
    """Ask Slurm whether it can ever start a script; it starts nothing. Raises UserError with Slurm's reason."""
    _run(["sbatch", "--test-only"], script)


def submit(script: Path) -> str:
    """Submit a script; returns the job's id. Of the environment, Slurm keeps nothing."""
    return _run(["sbatch", "--parsable", "--export=NIL", str(script)]).strip().split(";")[0]


def find_job(name: str) -> Job | None:
    """The user's job of this name that waits or runs; the running one when there are two."""
    lines = _run(["squeue", "--me", "--noheader", f"--name={name}", "--format=%A|%T|%r"]).splitlines()
    jobs = [Job(*line.split("|", 2)) for line in lines]
    live = sorted((job for job in jobs if job.state != ENDING), key=lambda job: job.waits)
    return live[0] if live else None


def steps(job_id: str) -> dict[str, str]:
    """The hosts of a job's running steps, by the steps' names."""
    lines = _run(["squeue", "--noheader", "--steps", f"--jobs={job_id}", "--format=%j|%N"]).splitlines()
    return dict(line.split("|", 1) for line in lines)


def signal_script(job_id: str) -> None:
    """Ask the script of a running job to end its steps, and then itself."""
    _run(["scancel", "--batch", "--signal=TERM", job_id])


def cancel(job_id: str) -> None:
    """Take a job out of the queue, or end all of its processes at once."""
    _run(["scancel", job_id])


def _run(command: Sequence[str], text: str = "") -> str:
    env = without_secrets(os.environ)
    try:
        done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise UserError(f"no {command[0]} here: start the run where Slurm's commands are") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]}: no answer after {TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{command[0]}: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
