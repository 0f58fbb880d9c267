"""The script of a Slurm job: what it asks, and that its loops do what they say. Slurm's commands are fakes here.

The runners of these tests write a line to `trace` when they start, and end with the status in the file `end-NAME`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from agentrl.configs.slurm_config import SlurmConfig
from agentrl.errors import ConfigError
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.slurm import batch_script as rendering
from agentrl.placement.slurm.batch_script import batch_script, job_name

HERE = Path(__file__).parent
LINTER = Path(__file__).parents[4] / ".venv-lint" / "bin" / "shellcheck"
RUNNER = """
cd "$FAKE_SLURM"
echo "$1 on $SLURMD_NODENAME: $STEP_OPTIONS" >>trace
trap 'echo "$1 was asked to end" >>trace; exit 143' TERM
[ "$1" != supervisor ] || touch "$AGENTRL_PLACED_FILE"
until [ -e "end-$1" ]; do sleep 0.05; done
status=$(<"end-$1"); rm "end-$1"
exit "$status"
"""
GPU_PARTS = (
    PartSpec(name="engine", argv=("x",), need=Need(gpus=4)),
    PartSpec(name="proxy", argv=("x",), ranks=2, spread="spread"),
)
TWO_HOSTS = SlurmConfig(gpus_per_node=8, nodes=2, spare_nodes=1)


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def rendered(run_dir: Path, config: SlurmConfig, parts: Sequence[PartSpec] = GPU_PARTS) -> str:
    return batch_script(run_dir, parts, ["agentrl", "train", "it's a run.yaml"], config, work_dir=run_dir)


def test_the_options_hold_all_parts_and_the_spare_hosts(tmp_path: Path) -> None:
    config = SlurmConfig(
        partition="gpu", account="lab", time="2-00:00:00", spare_nodes=2, options=["--constraint=h100"]
    )
    run_dir = tmp_path / "r"
    assert options(rendered(run_dir, config)) == [
        f"--job-name={job_name(run_dir)}",
        "--nodes=3",
        f'--output="{run_dir}/logs/slurm.log"',
        "--open-mode=append",
        "--dependency=singleton",
        "--requeue",
        "--no-kill",
        "--export=NIL",
        "--signal=B:USR1@120",
        "--gres=gpu:8",
        "--exclusive",
        "--mem=0",
        "--partition=gpu",
        "--account=lab",
        "--time=2-00:00:00",
        "--constraint=h100",
    ]


def test_a_part_of_a_host_is_asked_for_by_its_size(tmp_path: Path) -> None:
    config = SlurmConfig(gpus_per_node=4, cpus_per_node=16, memory_gb_per_node=100)
    found = options(rendered(tmp_path, config))
    assert {"--ntasks-per-node=1", "--cpus-per-task=16", "--mem=100G", "--gres=gpu:4"} <= set(found)
    assert "--exclusive" not in found


def test_runs_of_one_name_in_two_folders_are_two_jobs(tmp_path: Path) -> None:
    assert job_name(tmp_path / "a" / "r") != job_name(tmp_path / "b" / "r")
    assert job_name(tmp_path / "a" / "r") == job_name(tmp_path / "a" / ".." / "a" / "r")


def test_a_folder_that_no_script_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="characters that a script of Slurm cannot hold"):
        rendered(tmp_path / "two\nlines", SlurmConfig())


def test_the_script_is_clean_to_shellcheck(tmp_path: Path) -> None:
    linter = shutil.which("shellcheck") or (str(LINTER) if LINTER.exists() else None)
    if linter is None:
        pytest.skip("shellcheck is not installed: run `make setup-lint`")
    script = tmp_path / "job.sh"
    script.write_text(rendered(tmp_path / "a 'quoted' $run", SlurmConfig(setup=["module load cuda"])))
    done = subprocess.run([linter, "--shell=bash", "--severity=warning", script], capture_output=True, text=True)
    assert done.stdout == ""


@dataclass
class Job:
    """A script that runs with fake commands."""

    home: Path
    process: subprocess.Popen[str]

    def trace(self) -> list[str]:
        file = self.home / "trace"
        return file.read_text().splitlines() if file.exists() else []

    def until(self, met: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the trace meets a condition."""
        limit = time.monotonic() + 60
        while not met(lines := self.trace()):
            assert time.monotonic() < limit, (lines, (self.home / "log").read_text())
            time.sleep(0.05)
        return lines

    def end(self, name: str, status: int) -> None:
        draft = self.home / f"draft-{name}"
        draft.write_text(str(status))
        draft.rename(self.home / f"end-{name}")

    def set_hosts(self, *hosts: str) -> None:
        draft = self.home / "draft-hosts"
        draft.write_text("\n".join(hosts))
        draft.rename(self.home / "hosts")

    def steps(self) -> list[str]:
        return [file.read_text().strip() for file in (self.home / "steps").iterdir()]

    def processes(self) -> list[psutil.Process]:
        """The processes of the script's session that live."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def orphans(self) -> list[psutil.Process]:
        """The steps of sessions of their own, which live on when the script was killed."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid != os.getpid() and any(str(self.home) in word for word in process.info["cmdline"] or ())
        ]

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def calls(self) -> list[str]:
        file = self.home / "calls"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of three hosts, one a spare, whose script runs in a folder with a difficult name."""
    home = tmp_path / "it's $HOME"
    (home / "bin").mkdir(parents=True)
    (home / "runner.sh").write_text(RUNNER)
    for command in ("srun", "squeue", "scontrol", "scancel"):
        file = home / "bin" / command
        file.write_text(f'#!/bin/sh\nexec bash "{HERE}/fake_slurm.sh" {command} "$@"\n')
        file.chmod(0o755)

    def runner(folder: Path, part: str, rank: int | str) -> list[str]:
        return ["bash", str(home / "runner.sh"), f"{part}-{rank}"]

    monkeypatch.setattr(rendering, "runner_command", runner)
    supervisor = ["bash", str(home / "runner.sh"), "supervisor"]
    script = home / "job.sh"
    script.write_text(
        batch_script(home, GPU_PARTS, supervisor, TWO_HOSTS, work_dir=home, pause_s=0, watch_s=1, stop_s=1)
    )
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "a,b,c",
        "SLURMD_NODENAME": "a",
        "SLURM_CPUS_ON_NODE": "64",
        "FAKE_SLURM": str(home),
    }
    env = os.environ | slurm | {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "0,1"}
    (home / "hosts").write_text("a\nb\nc")
    with (home / "log").open("w") as log:
        process = subprocess.Popen(["bash", script], env=env, stdout=log, stderr=log, text=True, start_new_session=True)
    started = Job(home, process)
    try:
        started.until(lambda lines: len(lines) == 4)
        yield started
    finally:
        started.set_hosts()
        for left in [*started.processes(), *started.orphans()]:  # also after the script has ended
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def hosts_of(lines: Sequence[str]) -> dict[str, str]:
    """The last host of each process."""
    return {words[0]: words[2].rstrip(":") for words in (line.split() for line in lines) if words[1] == "on"}


def finish(job: Job) -> int:
    """Let the run end, as the supervisor and the runners end it."""
    for name in ("engine-0", "proxy-0", "proxy-1", "supervisor"):
        job.end(name, 0)
    return job.process.wait(60)


def test_every_process_gets_its_gpus_and_the_job_ends_with_the_run(job: Job) -> None:
    options = {line.split()[0]: line.split(": ")[1] for line in job.trace()}
    assert options == {
        "engine-0": "gpu:4 32",
        "proxy-0": "none None",
        "proxy-1": "none None",
        "supervisor": "none None",
    }
    hosts = hosts_of(job.trace())
    assert hosts["proxy-0"] != hosts["proxy-1"]
    assert finish(job) == 0


def test_an_ended_job_leaves_no_process(job: Job) -> None:
    assert finish(job) == 0
    job.set_hosts()  # as Slurm ends the steps of a job that has ended
    assert psutil.wait_procs(job.processes(), timeout=60)[1] == []


def test_a_runner_with_a_nonzero_status_is_restarted_on_its_host(job: Job) -> None:
    before = hosts_of(job.trace())
    job.end("proxy-1", 7)
    lines = job.until(lambda lines: len(lines) == 5)
    assert hosts_of(lines) == before
    job.end("proxy-1", 0)
    assert finish(job) == 0
    assert len(job.trace()) == 5
    assert "(status 7): again" in (job.home / "log").read_text()


def test_the_processes_of_a_lost_host_move_to_the_spare_together(job: Job) -> None:
    before = hosts_of(job.trace())
    moved = [name for name, host in before.items() if host == "b"]
    assert set(moved) < {"engine-0", "proxy-0", "proxy-1"}
    job.set_hosts("a", "c")
    assert hosts_of(job.until(lambda lines: len(lines) == 4 + len(moved))) == before | dict.fromkeys(moved, "c")
    assert finish(job) == 0


def test_without_an_answer_of_slurm_every_process_stays_where_it_was(job: Job) -> None:
    before = hosts_of(job.trace())
    (job.home / "controller-is-down").touch()
    job.end("proxy-1", 1)
    assert hosts_of(job.until(lambda lines: len(lines) == 5)) == before
    (job.home / "controller-is-down").unlink()
    assert finish(job) == 0


def test_a_failed_run_ends_its_steps_and_fails_the_job(job: Job) -> None:
    job.end("supervisor", 2)
    assert job.process.wait(60) == 2
    assert sorted(job.trace()[4:]) == [f"{name} was asked to end" for name in ("engine-0", "proxy-0", "proxy-1")]


def test_a_supervisor_that_was_killed_is_started_again(job: Job) -> None:
    job.end("supervisor", 137)
    job.until(lambda lines: sum(line.startswith("supervisor on") for line in lines) == 2)
    assert finish(job) == 0


def test_before_the_time_limit_the_steps_are_ended_and_the_job_is_queued_for_all_of_its_hosts(job: Job) -> None:
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.process.wait(60) == 0
    assert len([line for line in job.trace() if line.endswith("was asked to end")]) == 4
    calls = [call for call in job.calls() if not call.startswith("scancel")]
    assert calls == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3-3"]


def test_a_cancelled_job_ends_its_steps(job: Job) -> None:
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.process.wait(60) == 0
    assert len([line for line in job.trace() if line.endswith("was asked to end")]) == 4


def test_ending_the_watch_step_does_not_requeue_the_job(job: Job) -> None:
    job.until(lambda lines: "watch" in job.steps())
    (step,) = [file for file in (job.home / "steps").iterdir() if file.read_text().strip() == "watch"]
    sleeps: list[psutil.Process] = []
    while not sleeps:
        sleeps = [one for one in psutil.Process(int(step.name)).children(recursive=True) if one.name() == "sleep"]
    sleeps[0].kill()  # as scancel does, before it ends the shell
    job.until(lambda lines: not step.exists())
    assert job.calls() == []
    assert finish(job) == 0


def test_a_job_whose_script_lost_its_host_is_queued_again(job: Job) -> None:
    job.until(lambda lines: "watch" in job.steps())
    job.process.kill()
    job.set_hosts("b", "c")
    job.until(lambda lines: len(job.calls()) == 2)
    assert job.calls() == ["scontrol requeue 7", "scontrol update JobId=7 NumNodes=3-3"]
