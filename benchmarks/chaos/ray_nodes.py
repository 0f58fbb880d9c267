"""A Ray cluster of simulated nodes on this machine: a head that holds nothing of a run, and nodes that come and go."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
from ray.cluster_utils import Cluster

NODE_CPUS = 4
STORE_BYTES = 80 * 2**20
KILL_ACTOR = """
import ray, sys
ray.init(sys.argv[1], namespace="agentrl", log_to_driver=False)
ray.kill(ray.get_actor(sys.argv[2]), no_restart=False)
"""


class Nodes:
    """The nodes, by the process id of their raylet."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._cluster: Any = None
        self.start()

    @property
    def address(self) -> str:
        """`HOST:PORT` of the cluster."""
        return str(self._cluster.address)

    def start(self) -> None:
        """Start a head and the nodes."""
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._count):
            self.add()

    def add(self) -> None:
        """Start one more node."""
        self._cluster.add_node(num_cpus=NODE_CPUS, num_gpus=0, object_store_memory=STORE_BYTES)

    def node_of(self, pid: int) -> int:
        """The raylet above a process."""
        raylets = {_raylet(node) for node in self._cluster.worker_nodes}
        return next(up.pid for up in psutil.Process(pid).parents() if up.pid in raylets)

    def kill_node(self, raylet: int) -> None:
        """SIGKILL a raylet."""
        (node,) = [node for node in self._cluster.worker_nodes if _raylet(node) == raylet]
        self._cluster.remove_node(node, allow_graceful=False)

    def freeze(self, raylet: int, seconds: float) -> None:
        """SIGSTOP a raylet and everything below it for some seconds."""
        processes = [psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)]
        _signal(processes, signal.SIGSTOP)
        time.sleep(seconds)
        _signal(processes, signal.SIGCONT)

    def kill_actor(self, name: str) -> None:
        """`ray.kill`: Ray starts the actor again."""
        subprocess.run([sys.executable, "-c", KILL_ACTOR, self.address, name], check=True)

    def kill_head(self) -> None:
        """SIGKILL the head's GCS, wait until Ray has ended the nodes, and start another cluster."""
        gcs = self._cluster.head_node.all_processes["gcs_server"][0].process
        raylets = [psutil.Process(_raylet(node)) for node in self._cluster.worker_nodes]
        gcs.kill()
        gcs.wait()
        psutil.wait_procs(raylets, timeout=300)
        self.stop()
        self.start()

    def stop(self) -> None:
        """End all nodes."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, number)
