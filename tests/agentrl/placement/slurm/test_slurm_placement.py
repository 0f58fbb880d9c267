"""Runs placed by a real Slurm: slurmctld, and a slurmd for each of four hosts. The runners only write a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_cluster import Cluster, cluster, missing

from agentrl.configs.slurm_config import SlurmConfig
from agentrl.environment import DATABASE_URL
from agentrl.errors import ConfigError, UserError
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.slurm import batch_script, slurm_commands
from agentrl.placement.slurm.batch_script import job_name
from agentrl.placement.slurm.slurm_placement import SlurmPlacement

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.long
RUNNER = """
cd "$1"
echo "$2 $SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-none}" >>trace
[ "$2" != supervisor ] || touch "$AGENTRL_PLACED_FILE"
trap 'echo "$2 asked-to-end -" >>trace; exit 143' TERM
until [ -e finished ]; do sleep 0.1; done
"""
PARTS = (
    PartSpec(name="trainer", argv=("x",), ranks=2, gang=True, spread="one_per_host", need=Need(gpus=2)),
    PartSpec(name="engine-0", argv=("x",), need=Need(gpus=2)),
    PartSpec(name="engine-1", argv=("x",), need=Need(gpus=2)),
    PartSpec(name="proxy", argv=("x",), ranks=2, spread="spread"),
)
PROCESSES = ["engine-0-0", "engine-1-0", "proxy-0", "proxy-1", "supervisor", "trainer-0", "trainer-1"]
SLOTS = SlurmConfig(gpus_per_node=4, spare_nodes=1)


@dataclass
class Run:
    """A run's folder, and its placement."""

    folder: Path
    placement: SlurmPlacement

    def trace(self) -> list[list[str]]:
        file = self.folder / "trace"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, met: Callable[[list[list[str]]], bool]) -> list[list[str]]:
        limit = time.monotonic() + 240
        while not met(lines := self.trace()):
            log = self.folder / "logs" / "slurm.log"
            assert time.monotonic() < limit, (lines, log.exists() and log.read_text())
            time.sleep(0.1)
        return lines

    def started(self) -> dict[str, tuple[str, str]]:
        """Wait until all processes have started; their hosts and GPUs."""
        lines = self.until(lambda lines: len({line[0] for line in lines}) == len(PROCESSES))
        return {name: (host, gpus) for name, host, gpus in lines}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "home", hosts=4, gpus=4) as found:
        yield found


@pytest.fixture
def run(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run in a folder with a difficult name."""
    folder = tmp_path / "100% it's"
    folder.mkdir()
    (folder / "runner.sh").write_text(RUNNER)

    def runner(of: Path, part: str, rank: int | str) -> list[str]:
        return ["bash", str(folder / "runner.sh"), str(folder), f"{part}-{rank}"]

    monkeypatch.setattr(batch_script, "runner_command", runner)
    monkeypatch.setattr(batch_script, "WATCH_S", 2)
    supervisor = ["bash", str(folder / "runner.sh"), str(folder), "supervisor"]
    monkeypatch.setenv(DATABASE_URL, "postgresql://user:a-secret@db/x")
    started = Run(folder, SlurmPlacement(folder, supervisor, SLOTS))
    yield started
    (folder / "finished").touch()
    started.placement.remove(kill=True)
    slurm.until("squeue", "--noheader", answer="")


def gpus_of(found: dict[str, tuple[str, str]], host: str) -> Sequence[str]:
    return sorted(gpu for at, gpus in found.values() if at == host and gpus != "none" for gpu in gpus.split(","))


def test_one_job_holds_the_run_and_is_found_again(slurm: Cluster, run: Run) -> None:
    run.placement.check(PARTS)
    run.placement.apply(PARTS)
    found = run.started()
    hosts = {found["trainer-0"][0], found["trainer-1"][0]}
    assert {host: gpus_of(found, host) for host in hosts} == {host: ["0", "1", "2", "3"] for host in hosts}
    again = SlurmPlacement(run.folder, ["bash", str(run.folder / "runner.sh"), str(run.folder), "supervisor"], SLOTS)
    again.apply(PARTS)  # another process, after a crash of the first
    assert len(slurm.ask("squeue", "--noheader").splitlines()) == 1
    placed = {f"{state.part}-{state.rank}": state.host for state in again.states()}
    assert placed == {name: host for name, (host, _) in found.items() if name != "supervisor"}
    (run.folder / "finished").touch()
    slurm.until("squeue", "--noheader", answer="")
    assert "JobState=COMPLETED" in slurm.ask("scontrol", "show", "job", "--oneliner", last_job(slurm))


def last_job(slurm: Cluster) -> str:
    """The id of the newest job that the controller knows."""
    jobs = slurm.ask("squeue", "--noheader", "--states=all", "--format=%A").split()
    return str(max(map(int, jobs)))


def test_slurm_keeps_no_secret_of_the_submitting_environment(slurm: Cluster, run: Run) -> None:
    run.placement.apply(PARTS)
    run.started()
    kept = [file for file in (slurm.home / "state").rglob("*") if file.is_file()]
    assert any(b"engine-0" in file.read_bytes() for file in kept)  # the script
    assert not any(b"a-secret" in file.read_bytes() for file in kept)


def test_a_job_with_other_parts_is_not_taken_for_this_one(slurm: Cluster, run: Run) -> None:
    run.placement.apply(PARTS)
    with pytest.raises(ConfigError, match=r"submitted with other parts or settings: .*scancel \d+"):
        run.placement.apply(PARTS[1:])


def test_what_slurm_can_never_start_is_refused_in_its_words(slurm: Cluster, run: Run) -> None:
    placement = SlurmPlacement(run.folder, ["true"], SlurmConfig(gpus_per_node=4, nodes=9))
    with pytest.raises(UserError, match=r"^sbatch: .*node"):
        placement.check(PARTS)
    with pytest.raises(UserError, match=r"(?i)^sbatch: .*partition"):
        SlurmPlacement(run.folder, ["true"], SlurmConfig(gpus_per_node=4, partition="other")).check(PARTS)


def test_a_waiting_job_shows_its_reason_and_can_be_removed(slurm: Cluster, run: Run) -> None:
    slurm.ask("scontrol", "update", "PartitionName=main", "State=DOWN")
    try:
        run.placement.apply(PARTS)
        slurm.until("squeue", "--noheader", "--format=%r", answer="PartitionDown")
        assert {(state.state, state.reason) for state in run.placement.states()} == {("waiting", "PartitionDown")}
        run.placement.remove()
        slurm.until("squeue", "--noheader", answer="")
    finally:
        slurm.ask("scontrol", "update", "PartitionName=main", "State=UP")


def test_a_removed_job_ends_its_runners_first(slurm: Cluster, run: Run) -> None:
    run.placement.apply(PARTS)
    run.started()
    run.placement.remove()
    slurm.until("squeue", "--noheader", answer="")
    assert sorted(name for name, what, _ in run.trace() if what == "asked-to-end") == PROCESSES


def test_the_processes_of_a_lost_host_start_on_the_spare(slurm: Cluster, run: Run) -> None:
    run.placement.apply(PARTS)
    before = run.started()
    scripts = slurm.ask("squeue", "--noheader", "--format=%B").strip()
    lost = next(host for host, _ in before.values() if host != scripts)
    moved = {name for name, (host, _) in before.items() if host == lost}
    slurm.lose(lost)
    after = run.until(lambda lines: len(lines) == len(PROCESSES) + len(moved))[len(PROCESSES) :]
    assert {name for name, _, _ in after} == moved
    assert len({host for _, host, _ in after} - {host for host, _ in before.values()}) == 1
    slurm.start(lost)


def test_a_job_that_lost_the_host_of_its_script_starts_again_on_as_many_hosts(slurm: Cluster, run: Run) -> None:
    run.placement.apply(PARTS)
    run.started()
    scripts = slurm.ask("squeue", "--noheader", "--format=%B").strip()
    slurm.lose(scripts)
    slurm.until("squeue", "--noheader", "--format=%T", answer="PENDING")
    slurm.until("squeue", "--noheader", "--steps", answer="")
    slurm.start(scripts)
    job = slurm_commands.find_job(job_name(run.folder))
    slurm.ask("scontrol", "update", f"JobId={job.id}", "StartTime=now")  # Slurm waits for two minutes
    slurm.until("squeue", "--noheader", "--format=%T %D", answer="RUNNING 3")
    run.until(lambda lines: sum(what != "asked-to-end" for _, what, _ in lines) == 2 * len(PROCESSES))
