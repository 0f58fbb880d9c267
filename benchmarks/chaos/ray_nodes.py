"""A Ray cluster of simulated nodes: a head that holds nothing of a run, and nodes on hosts of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from chaos.network_hosts import HERE, Host, HostNetwork

HEAD_PORT = 6390  # not one of those that Ray gives its workers
NODE_CPUS = 4
STORE_BYTES = 80 * 2**20
READY_S = 120.0
POLL_S = 0.2
JOINED = "Ray runtime started"
RAY = (sys.executable, "-m", "ray.scripts.scripts")
KILL_ACTOR = """
import ray, sys
ray.init(sys.argv[1], namespace="agentrl", log_to_driver=False)
ray.kill(ray.get_actor(sys.argv[2]), no_restart=False)
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A node on a host: `ray start --block`, which starts, watches and reaps the node's own processes."""

    host: Host
    starter: subprocess.Popen[bytes]

    @property
    def raylet(self) -> psutil.Process | None:
        """The node's raylet; None before it has started and after it has ended."""
        return _child(self.starter.pid, "raylet")

    def processes(self) -> list[psutil.Process]:
        """All processes of the node."""
        with contextlib.suppress(psutil.NoSuchProcess):
            starter = psutil.Process(self.starter.pid)
            return [starter, *starter.children(recursive=True)]
        return []


class Nodes:
    """The head and the nodes."""

    address = f"{HERE}:{HEAD_PORT}"

    def __init__(self, count: int) -> None:
        self._count = count
        self._network = HostNetwork()
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: names of sockets are
        self._nodes: list[Node] = []
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        head = ["--head", "--port", str(HEAD_PORT), "--num-cpus", "0", "--include-dashboard", "false"]
        self._head = _ray_start([], HERE, [*head, "--temp-dir", str(self._folder)], self._folder / "head.log")
        _until(self._answers)
        for _ in range(self._count):
            self.add()
        _until(lambda: all(self._joined(node) for node in self._nodes))

    def add(self) -> None:
        """Start one more node, on a new host."""
        host = self._network.add()
        options = ["--address", self.address, "--num-cpus", str(NODE_CPUS)]
        options += ["--temp-dir", str(self._folder / host.name)]
        starter = _ray_start(host.prefix, host.address, options, self._folder / f"{host.name}.log")
        self._nodes.append(Node(host, starter))

    def node_of(self, pid: int) -> Node:
        """The node of a process."""
        above = {process.pid for process in psutil.Process(pid).parents()}
        return next(node for node in self._nodes if node.starter.pid in above)

    def raylets(self) -> set[int]:
        """Process ids of the raylets."""
        return {raylet.pid for node in self._nodes if (raylet := node.raylet) is not None}

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill_node(self, node: Node) -> None:
        """SIGKILL a raylet."""
        assert node.raylet is not None
        node.raylet.kill()

    def leave_zombie(self, node: Node, seconds: float) -> None:
        """SIGKILL a raylet; for some seconds its parent does not reap it."""
        assert node.raylet is not None
        node.starter.send_signal(signal.SIGSTOP)
        node.raylet.kill()
        time.sleep(seconds)
        node.starter.send_signal(signal.SIGCONT)

    def freeze(self, node: Node, seconds: float) -> None:
        """SIGSTOP all processes of a node for some seconds."""
        processes = node.processes()
        _signal(processes, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(processes, signal.SIGCONT)

    def cut(self, node: Node, seconds: float) -> None:
        """Cut a node's host off for some seconds."""
        node.host.cut()
        time.sleep(seconds)
        node.host.join()

    def kill_actor(self, name: str) -> None:
        """`ray.kill`: Ray starts the actor again."""
        subprocess.run([sys.executable, "-c", KILL_ACTOR, self.address, name], check=True)

    def kill_head(self) -> None:
        """SIGKILL the head's GCS, wait until Ray has ended the nodes, and start another cluster."""
        gcs = _child(self._head.pid, "gcs_server")
        assert gcs is not None
        gcs.kill()
        for node in self._nodes:
            node.starter.wait(READY_S)
        self._end()
        self._start()

    def _joined(self, node: Node) -> bool:
        return JOINED in (self._folder / f"{node.host.name}.log").read_text()

    def _answers(self) -> bool:
        """Whether the head accepts connections. Raises RuntimeError when it has ended."""
        if self._head.poll() is not None:
            raise RuntimeError(f"`ray start --head` ended: {(self._folder / 'head.log').read_text()[-1000:]}")
        with contextlib.suppress(OSError):
            socket.create_connection((HERE, HEAD_PORT), 1.0).close()
            return True
        return False

    # -- the end ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all nodes."""
        self._end()
        self._network.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """End the head and the nodes: their own processes, and what those have left behind."""
        nodes = [Node(Host("", HERE), self._head), *self._nodes]
        processes = [process for node in nodes for process in node.processes()]
        _signal(processes, signal.SIGKILL)
        psutil.wait_procs(processes)
        for node in nodes:
            node.starter.wait()
        self._nodes.clear()


def _ray_start(prefix: Sequence[str], address: str, options: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    words = ["start", "--block", "--disable-usage-stats", "--node-ip-address", address, "--num-gpus", "0"]
    words += ["--object-store-memory", str(STORE_BYTES), *options]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *RAY, *words], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )


def _child(pid: int, name: str) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster does not start")
        time.sleep(POLL_S)


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, number)
