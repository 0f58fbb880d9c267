"""The Slurm job of a run, as its placement sees it in the queue. The commands are scripts; test_slurm_placement.py has
a real Slurm.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.configs.slurm_config import SlurmConfig
from agentrl.errors import ConfigError, UserError
from agentrl.placement.part_spec import PartSpec
from agentrl.placement.slurm.batch_script import job_name
from agentrl.placement.slurm.slurm_placement import SCRIPT, SlurmPlacement

Script = Callable[[str, str], None]
PARTS = (PartSpec(name="engine-0", argv=("x",)), PartSpec(name="proxy", argv=("x",), ranks=2))
WAITS, RUNS, ENDS = "7|PENDING|Resources", "7|RUNNING|None", "7|COMPLETING|None"


class Queue:
    """A folder in which Slurm's commands leave what they were called with, and squeue finds its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has("")

    def has(self, job: str, steps: str = "") -> None:
        (self.folder / "job").write_text(job)
        (self.folder / "steps").write_text(steps)

    @property
    def called(self) -> list[str]:
        file = self.folder / "called"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def queue(script: Script, tmp_path: Path) -> Queue:
    script("squeue", f'case "$*" in *--steps*) cat {tmp_path}/steps;; *) cat {tmp_path}/job;; esac')
    for name in ("sbatch", "scancel"):
        script(name, f'echo "{name} $*" >> {tmp_path}/called; echo 7')
    return Queue(tmp_path)


@pytest.fixture
def placement(tmp_path: Path) -> SlurmPlacement:
    return SlurmPlacement(tmp_path / "run", ["follow"], SlurmConfig(gpus_per_node=4))


def test_a_run_without_a_job_is_submitted_once(queue: Queue, placement: SlurmPlacement, tmp_path: Path) -> None:
    assert placement.states() == []
    placement.apply(PARTS)
    script = tmp_path / "run" / SCRIPT
    assert queue.called == [f"sbatch --parsable --export=NIL {script}"]
    assert script.read_text() == placement.script(PARTS)
    assert job_name(tmp_path / "run") in script.read_text()
    assert (tmp_path / "run" / "logs").is_dir()
    queue.has(WAITS)
    placement.apply(PARTS)
    assert len(queue.called) == 1
    with pytest.raises(ConfigError, match=r"Slurm job 7 .*other parts or settings: restore them, or .*`scancel 7`"):
        placement.apply(PARTS[:1])
    queue.has(ENDS)
    placement.apply(PARTS[:1])
    assert len(queue.called) == 2
    assert script.read_text() == placement.script(PARTS[:1])


def test_runners_wait_for_the_jobs_reason_until_their_steps_run(queue: Queue, placement: SlurmPlacement) -> None:
    placement.apply(PARTS)
    queue.has(WAITS, "engine-0-0|n1")
    waiting = [(state.part, state.rank, state.state, state.reason) for state in placement.states()]
    processes = [("engine-0", 0), ("proxy", 0), ("proxy", 1)]
    assert waiting == [(part, rank, "waiting", "Resources") for part, rank in processes]
    queue.has(RUNS, "engine-0-0|n1\nproxy-1|n2\nother|n3\n")
    running = [(state.part, state.rank, state.state, state.host, state.reason) for state in placement.states()]
    assert running == [
        ("engine-0", 0, "placed", "n1", ""),
        ("proxy", 0, "waiting", "", ""),
        ("proxy", 1, "placed", "n2", ""),
    ]


@pytest.mark.parametrize(
    ("job", "kill", "called"),
    [
        ("", False, []),
        ("", True, []),
        (ENDS, True, []),
        (WAITS, False, ["scancel 7"]),
        (RUNS, False, ["scancel --batch --signal=TERM 7"]),
        (RUNS, True, ["scancel 7"]),
    ],
)
def test_a_running_job_ends_its_runners_first_unless_it_is_killed(
    queue: Queue, placement: SlurmPlacement, job: str, kill: bool, called: list[str]
) -> None:
    queue.has(job)
    placement.remove(kill=kill)
    assert queue.called == called


def test_what_slurm_can_never_start_is_refused_in_its_words(
    script: Script, queue: Queue, placement: SlurmPlacement, tmp_path: Path
) -> None:
    placement.check(PARTS)
    assert queue.called == ["sbatch --test-only"]
    script("sbatch", "echo 'sbatch: error: too many nodes' >&2; exit 1")
    with pytest.raises(UserError, match=r"^sbatch: sbatch: error: too many nodes$"):
        placement.check(PARTS)
    assert not (tmp_path / "run").exists()
