"""A Ray cluster of small simulated nodes; the task runner is a small program that starts a child of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import ConfigError
from agentrl.placement.part_spec import Need, PartSpec
from agentrl.placement.ray.ray_connection import RAY_ADDRESS, connected
from agentrl.placement.ray.ray_placement import RayPlacement

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.long
TIMEOUT_S = 240
GPUS = 4
RUNNER = """
import json, os, subprocess, sys, time

folder, part, rank = sys.argv[1:]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open(f"{folder}/{part}-{rank}.starts", "a") as starts:
    told = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "AGENTRL_ADDRESS", "RAY_RAYLET_PID")}
    starts.write(json.dumps({"pids": [os.getpid(), child.pid], **told}) + "\\n")
wanted = f"{folder}/{part}-{rank}.status"
while not os.path.exists(wanted):
    time.sleep(0.05)
status = int(open(wanted).read())
if status:  # the next start goes on
    os.remove(wanted)
sys.exit(status)
"""
"""Writes a line at each start, and ends with the status that it is given."""
DRIVER = """
import json, sys, time
from pathlib import Path
from test_ray_placement import placement, specs_of

run, folder, parts = sys.argv[1:]
placement(run, Path(folder)).apply(specs_of(parts))
print("applied", flush=True)
time.sleep(600)
"""


def runner(folder: Path, part: str, rank: int) -> list[str]:
    return [sys.executable, "-c", RUNNER, str(folder), part, str(rank)]


def placement(run: str, folder: Path) -> RayPlacement:
    return RayPlacement(run, folder, runner)


def specs_of(text: str) -> list[PartSpec]:
    return [PartSpec.model_validate(part) for part in json.loads(text)]


def part(name: str, ranks: int = 1, spread: Any = "pack", **need: Any) -> PartSpec:
    return PartSpec(name=name, argv=("run",), ranks=ranks, spread=spread, need=Need(**{"cpus": 0.1} | need), grace_s=0)


class Run:
    """A run's placement, and what its runners wrote."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.placement = placement(name, folder)

    def starts(self, part: str, rank: int = 0) -> list[dict[str, Any]]:
        """The records that the runners of a rank wrote, one a start."""
        path = self.folder / f"{part}-{rank}.starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def started(self, part: str, rank: int = 0, times: int = 1) -> dict[str, Any]:
        """Wait for a start of a rank."""
        until(lambda: len(self.starts(part, rank)) >= times, lambda: self.placement.states())
        return self.starts(part, rank)[times - 1]

    def end(self, part: str, status: int, rank: int = 0) -> None:
        """Let the runner of a rank end with a status."""
        path = self.folder / f"{part}-{rank}.new"
        path.write_text(str(status))
        path.rename(path.with_suffix(".status"))

    def state(self, part: str, rank: int = 0) -> Any:
        return next((s for s in self.placement.states() if (s.part, s.rank) == (part, rank)), None)

    def node(self, part: str, rank: int = 0, times: int = 1) -> int:
        """Process id of the raylet of the node where a rank started."""
        return int(self.started(part, rank, times)["RAY_RAYLET_PID"])

    def processes(self) -> list[psutil.Process]:
        """All processes that the runners wrote down and that live."""
        found = []
        for path in self.folder.glob("*.starts"):
            for line in path.read_text().splitlines():
                found += [psutil.Process(pid) for pid in json.loads(line)["pids"] if psutil.pid_exists(pid)]
        return found


def until(condition: Callable[[], Any], state: Callable[[], Any] = lambda: None) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, state()
        time.sleep(0.1)


def gone(pids: list[int]) -> None:
    """Wait until these processes are gone."""
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, timeout=TIMEOUT_S)[1] == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without CPUs for us, and two nodes."""
    from ray.cluster_utils import Cluster

    quick = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 1000,
        "health_check_failure_threshold": 5,
        "prestart_worker_first_driver": False,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20, "_system_config": quick}
        made = Cluster(initialize_head=True, head_node_args=head)
        add_node(made)
        add_node(made)
        patch.setenv(RAY_ADDRESS, made.address)
        connected()
        yield made
        ray.shutdown()
        made.shutdown()


def add_node(cluster: Any) -> None:
    cluster.add_node(num_cpus=4, num_gpus=GPUS, memory=8 * 10**9, object_store_memory=80 * 2**20)


@pytest.fixture
def run(cluster: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(f"run.{os.getpid()}-{abs(hash(request.node.name))}", tmp_path)
    yield made
    made.placement.remove(kill=True)
    gone([process.pid for process in made.processes()])


def test_a_gang_is_placed_on_different_nodes_and_each_sees_its_gpus(run: Run) -> None:
    run.placement.apply([part("trainer", 2, "one_per_host", gpus=3), part("engine-0", gpus=1), part("proxy")])
    nodes = {run.node("trainer", rank) for rank in range(2)}
    assert len(nodes) == 2
    for rank in range(2):
        assert len(run.started("trainer", rank)["CUDA_VISIBLE_DEVICES"].split(",")) == 3
    assert len(run.started("engine-0")["CUDA_VISIBLE_DEVICES"].split(",")) == 1
    assert run.started("proxy")["CUDA_VISIBLE_DEVICES"] == ""
    assert run.started("proxy")["AGENTRL_ADDRESS"] == ray.util.get_node_ip_address()
    until(lambda: {state.state for state in run.placement.states()} == {"placed"}, run.placement.states)


def test_another_program_finds_the_same_processes_after_the_first_was_killed(run: Run) -> None:
    parts = [part("trainer", 2, "one_per_host", gpus=1), part("proxy")]
    text = json.dumps([spec.model_dump() for spec in parts])
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    line = [sys.executable, "-c", DRIVER, run.name, str(run.folder), text]
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE) as driver:
        assert driver.stdout.readline() == b"applied\n"
        before = [run.started("trainer", 0), run.started("trainer", 1), run.started("proxy")]
        driver.kill()
    run.placement.apply(parts)
    until(lambda: [state.state for state in run.placement.states()] == ["placed"] * 3, run.placement.states)
    assert [run.starts("trainer", 0), run.starts("trainer", 1), run.starts("proxy")] == [[start] for start in before]
    assert all(psutil.pid_exists(pid) for start in before for pid in start["pids"])


def test_a_runner_that_fails_is_started_again_and_one_that_is_done_is_not(run: Run) -> None:
    run.placement.apply([part("proxy")])
    first = run.started("proxy")
    run.end("proxy", 3)
    second = run.started("proxy", times=2)
    until(lambda: run.state("proxy").reason == "its runner ended with status 3", run.placement.states)
    os.kill(second["pids"][0], signal.SIGKILL)
    third = run.started("proxy", times=3)
    until(lambda: run.state("proxy").reason == "its runner ended with status 137", run.placement.states)
    run.end("proxy", 0)
    until(lambda: run.state("proxy").state == "ended", run.placement.states)
    gone([pid for start in (first, second, third) for pid in start["pids"]])
    run.placement.apply([part("proxy")])
    assert run.state("proxy").state == "ended"
    assert len(run.starts("proxy")) == 3


def test_a_runner_that_refuses_its_input_is_counted_and_does_not_delay_the_removal(run: Run) -> None:
    line = "agentrl: host h does not see /runs/r/.secrets"
    code = f"import sys; print({line!r}, file=sys.stderr); sys.exit(2)"
    run.placement = RayPlacement(run.name, run.folder, lambda *_: [sys.executable, "-c", code])
    run.placement.apply([part("proxy")])
    until(lambda: run.state("proxy").refusals > 1, run.placement.states)
    found = run.state("proxy")
    assert (found.state, found.reason) == ("placed", "host h does not see /runs/r/.secrets")
    run.placement.remove()
    assert run.placement.states() == []


def kill_actor(run: Run) -> None:
    """What `ray.kill` does: the worker kills its children and exits."""
    ray.kill(ray.get_actor(f"agentrl:{run.name}:engine-0:0", "agentrl"), no_restart=False)


def kill_worker(run: Run) -> None:
    psutil.Process(worker_of(run)).kill()


def kill_guard(run: Run) -> None:
    (guard,) = psutil.Process(worker_of(run)).children()
    guard.kill()


def worker_of(run: Run) -> int:
    """The Ray worker: the youngest ancestor of the runner that is one."""
    ours = psutil.Process(run.starts("engine-0")[0]["pids"][0])
    return next(up.pid for up in ours.parents() if up.name().startswith("ray::"))


@pytest.mark.parametrize("kill", [kill_actor, kill_worker, kill_guard])
def test_a_rank_whose_actor_dies_starts_again_and_leaves_no_process_behind(run: Run, kill: Any) -> None:
    run.placement.apply([part("engine-0", gpus=1)])
    first = run.started("engine-0")
    kill(run)
    run.started("engine-0", times=2)
    gone(first["pids"])


def test_the_ranks_of_a_lost_node_start_on_another_and_leave_no_process_behind(cluster: Any, run: Run) -> None:
    run.placement.apply([part("trainer", 2, "one_per_host", gpus=1)])
    first = [run.started("trainer", rank) for rank in range(2)]
    raylet = run.node("trainer", 1)
    (lost,) = [node for node in cluster.worker_nodes if raylet_of(node) == raylet]
    cluster.remove_node(lost, allow_graceful=False)
    gone(first[1]["pids"])
    until(lambda: run.state("trainer", 1).reason.startswith("Ray: RESCHEDULING"), run.placement.states)
    assert run.state("trainer", 1).state == "waiting"
    add_node(cluster)
    assert run.node("trainer", 1, times=2) not in (raylet, run.node("trainer", 0))
    assert run.starts("trainer", 0) == [first[0]]


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def test_a_part_of_another_shape_is_placed_anew(run: Run) -> None:
    run.placement.apply([part("rollout"), part("proxy")])
    first, proxy = run.started("rollout"), run.started("proxy")
    run.placement.apply([part("rollout", 2), part("proxy")])
    run.started("rollout", times=2)
    run.started("rollout", 1)
    gone(first["pids"])
    assert run.starts("proxy") == [proxy]


def test_a_part_without_room_waits_with_its_reason(run: Run) -> None:
    run.placement.apply([part("engine-0", gpus=GPUS), part("engine-1", gpus=GPUS), part("engine-2", gpus=1)])
    until(lambda: "NO_RESOURCES" in run.state("engine-2").reason, run.placement.states)
    assert run.state("engine-2").state == "waiting"
    run.placement.apply([part("engine-0", gpus=GPUS), part("engine-1", gpus=GPUS), part("engine-2", gpus=1)])
    assert run.starts("engine-2") == []


def test_remove_waits_for_the_runners_and_leaves_nothing(run: Run) -> None:
    other = Run(f"{run.name}0", run.folder)
    run.placement.apply([part("trainer", 2, gpus=1), part("engine-0", gpus=GPUS + 1)])
    other.placement.apply([part("proxy")])
    other.started("proxy")
    for rank in range(2):
        run.started("trainer", rank)
        run.end("trainer", 0, rank)
    run.placement.remove()
    assert run.placement.states() == []
    assert run.placement._actors() == []
    gone([pid for rank in range(2) for pid in run.starts("trainer", rank)[0]["pids"]])
    assert [state.state for state in other.placement.states()] != ["ended"]
    other.placement.remove(kill=True)
    run.placement.remove()


def test_a_need_that_no_node_meets_is_refused(run: Run) -> None:
    run.placement.check([part("trainer", 2, "one_per_host", gpus=GPUS, memory_gb=7.9)])
    with pytest.raises(ConfigError, match=f"trainer needs 3 hosts of {GPUS} GPUs; the cluster has 2"):
        run.placement.check([part("trainer", 3, "one_per_host", gpus=GPUS)])
    with pytest.raises(ConfigError, match=r"engine-0 needs a host of 1 GPU, 8\.1 GB; the cluster has 3 hosts"):
        run.placement.check([part("engine-0", gpus=1, memory_gb=8.1)])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://127.0.0.1:1", "RAY_ADDRESS=ray://127.0.0.1:1: start the run on a host of the cluster"),
        ("127.0.0.1:1", "placement=ray: no cluster at 127.0.0.1:1 ("),
        ("somewhere", "placement=ray: "),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(address: str, said: str) -> None:
    code = (
        "from agentrl.placement.ray.ray_connection import connected\ntry: connected()\nexcept ValueError as e: print(e)"
    )
    env = os.environ | {RAY_ADDRESS: address}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(said)
    assert len(done.stdout.splitlines()) == 1


def test_a_programs_handler_of_sigterm_stays(cluster: Any) -> None:
    ray.shutdown()
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        connected()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
