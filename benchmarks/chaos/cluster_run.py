"""A training run on a Ray cluster, and the faults that it must survive."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import psutil
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from agentrl.placement.local_address import ADDRESS
from chaos.ray_nodes import Nodes
from chaos.run import NAME, Run

FROZEN_S = 60.0
RANKS = {"engine-0": 1, "engine-1": 1, "proxy": 2, "rollout": 2, "trainer": 2}
FAULTS = (
    "command trainer/0",
    "command trainer/1",
    "command engine-1/0",
    "command proxy/1",
    "command rollout/0",
    "guard trainer/1",
    "guard proxy/0",
    "runner rollout/1",
    "actor engine-0/0",
    "actor proxy/0",
    "supervisor",
    "node trainer/1",
    "node engine-0/0",
    "frozen trainer/0",
    "head",
)
"""Fault and target: `node` kills the raylet of the rank's node, `frozen` stops all its processes for FROZEN_S."""


@dataclass
class ClusterRun(Run):
    """`agentrl train` with `placement: ray`: engines, two proxies, two rollout workers, a trainer over two nodes."""

    nodes: Nodes | None = None
    engines: int = 2

    def _config(self) -> dict[str, Any]:
        sizes = {"engines": {"count": self.engines}, "trainer": {"ranks": 2, "hosts": 2}}
        return super()._config() | {
            "placement": "ray",
            "resources": sizes | {"proxies": RANKS["proxy"], "rollout_workers": RANKS["rollout"]},
            "engine": {"device": "cpu", "urls": [self.engine_url] if self.engine_url else []},
            "trainer": super()._config()["trainer"] | {"device": "cpu"},
        }

    def start(self) -> None:
        """Start the supervisor, on the cluster."""
        assert self.nodes is not None
        env = os.environ | {"RAY_ADDRESS": self.nodes.address, "AGENTRL_DATABASE_URL": self.database_url}
        argv = [sys.executable, "-m", "agentrl", "train", "config.yaml", f"steps={self.steps}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                argv, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def leftovers(self) -> list[psutil.Process]:
        """Processes of the run's ranks that live, wherever they were moved: by their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            env = process.environ()
            alive = process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False
        return alive and ADDRESS in env and str(self.folder) in env.get("PYTHONPATH", "")

    def below(self, raylet: int) -> list[psutil.Process]:
        """The processes of a node that belong to the run's ranks."""
        return [process for process in psutil.Process(raylet).children(recursive=True) if self._is_ours(process)]

    def whole(self) -> bool:
        """Whether every rank runs and has a lease."""
        return len(self.ranks()) == sum(ranks for part, ranks in RANKS.items() if part in self._parts())

    def ranks(self) -> dict[str, int]:
        """Rank → the guard of its command, for the ranks that run now."""
        query = text(
            "SELECT r.part, r.rank, r.pid FROM part_ranks r JOIN runs ON runs.id = r.run_id WHERE runs.name = :name "
            "AND r.state = 'running' AND r.leased_until > extract(epoch FROM clock_timestamp())"
        )
        try:
            with self.database.connect() as conn:
                return {f"{row.part}/{row.rank}": row.pid for row in conn.execute(query, {"name": NAME})}
        except DBAPIError:  # no tables yet
            return {}

    def _parts(self) -> list[str]:
        return [part for part in RANKS if not part.startswith("engine") or int(part[7:]) < self.engines]

    def can(self, fault: str) -> bool:
        """Whether the rank of a fault is one of this run's."""
        return " " not in fault or fault.split()[1].split("/")[0] in self._parts()

    def do(self, fault: str) -> list[psutil.Process]:
        """Carry out a fault; returns the processes that must end because of it."""
        assert self.nodes is not None
        kind, _, rank = fault.partition(" ")
        if kind == "supervisor":
            self.kill("supervisor")
            return []
        if kind == "head":
            doomed = self.leftovers()
            assert self.process is not None
            self.nodes.kill_head()
            self.process.kill()
            self.process.wait()
            self.start()
            return doomed
        guard = psutil.Process(self.ranks()[rank])
        raylet = self.nodes.node_of(guard.pid)
        if kind == "node":
            doomed = self.below(raylet)
            self.nodes.kill_node(raylet)
            self.nodes.add()
            return doomed
        if kind == "frozen":
            self.nodes.freeze(raylet, FROZEN_S)
            return []
        doomed = [guard, *guard.children(recursive=True)]
        if kind == "actor":
            self.nodes.kill_actor(f"agentrl:{NAME}:{rank.replace('/', ':')}")
        elif kind == "command":
            doomed[-1].kill()
        else:  # the command's guard, its runner, the runner's keeper and guard, Ray's worker
            runner = guard.parents()
            doomed += runner[:3]
            runner[0 if kind == "runner" else 2].kill()
        return doomed
