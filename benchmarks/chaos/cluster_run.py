"""A training run on a Ray cluster, and the faults that it must survive."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from agentrl.own_address import ADDRESS
from chaos.ray_nodes import Node, Nodes
from chaos.run import NAME, SUPERVISOR, Run, RunFailed

STANDS_S = 60.0
MORE_STEPS = 4
POLL_S = 0.2
RANKS = {"engine-0": 1, "engine-1": 1, "proxy": 2, "rollout": 2, "trainer": 2}
FAULTS = (
    "command trainer/0",
    "command trainer/1",
    "command engine-0/0",
    "command engine-1/0",
    "command proxy/1",
    "command rollout/0",
    "guard trainer/1",
    "guard proxy/0",
    "runner trainer/0",
    "runner rollout/1",
    "worker trainer/1",
    "worker proxy/1",
    "actor engine-0/0",
    "actor proxy/0",
    "supervisor",
    "node trainer/1",
    "node engine-0/0",
    "zombie trainer/1",
    "frozen trainer/0",
    "partition trainer/1",
    "stopping supervisor",
    "head",
)
"""The faults, by kind and target.

command, runner, guard, worker   SIGKILL: a rank's command, its task runner, the runner's guard, its Ray worker
actor                            `ray.kill` of its actor
node, zombie                     SIGKILL: the raylet of its node, which is not reaped for STANDS_S
frozen, partition                its node is stopped, or has no network, for STANDS_S
supervisor, stopping supervisor  SIGKILL, also while it stops the run
head                             SIGKILL: Ray's GCS
"""


@dataclass
class ClusterRun(Run):
    """`agentrl train` with `placement: ray`: engines, two proxies, two rollout workers, a trainer over two nodes."""

    nodes: Nodes | None = None
    engines: int = 2
    think_s: float = 1.0
    stuck_s: float = 420.0

    def _config(self) -> dict[str, Any]:
        sizes = {"engines": {"count": self.engines}, "trainer": {"ranks": 2, "hosts": 2}}
        return super()._config() | {
            "placement": "ray",
            "resources": sizes | {"proxies": RANKS["proxy"], "rollout_workers": RANKS["rollout"]},
            "engine": {"device": "cpu", "urls": [self.engine_url] if self.engine_url else []},
            "trainer": super()._config()["trainer"] | {"device": "cpu"},
        }

    def start(self) -> None:
        """Start the supervisor, or start it again."""
        assert self.nodes is not None
        self.launch([sys.executable, "-m", "agentrl", "train"], {"RAY_ADDRESS": self.nodes.address})

    def launch(self, command: list[str], env: dict[str, str]) -> None:
        """Start a supervisor with the run's configuration."""
        argv = [*command, "config.yaml", f"steps={self.steps}"]
        env = os.environ | {"AGENTRL_DATABASE_URL": self.database_url} | env
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

    def orphans(self) -> list[psutil.Process]:
        """Processes of the run's ranks that are not below a living raylet."""
        assert self.nodes is not None
        raylets, found = self.nodes.raylets(), []
        for process in self.leftovers():
            with contextlib.suppress(psutil.NoSuchProcess):
                if raylets.isdisjoint(up.pid for up in process.parents()):
                    found.append(process)
        return found

    def below(self, node: Node) -> list[psutil.Process]:
        """The processes of a node that belong to the run's ranks."""
        return [process for process in node.processes() if self._is_ours(process)]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; a run that finishes before is extended. Raises RunFailed if it fails or is stuck."""
        last, since = self.position(), time.monotonic()
        while not condition():
            if (now := self.position()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > self.stuck_s:
                running = sorted(self.ranks())
                raise RunFailed(f"no progress for {self.stuck_s:g} s; running: {running}; {self.last_line()}")
            if condition != self.finished and self.finished():
                self.extend()
            time.sleep(POLL_S)

    def extend(self) -> None:
        """Let a finished run go on, with more steps."""
        self.steps += MORE_STEPS
        self.start()

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

    def starts(self) -> dict[str, int]:
        """Rank → how often its command was started."""
        query = text("SELECT r.part, r.rank, r.starts FROM part_ranks r JOIN runs ON runs.id = r.run_id")
        with self.database.connect() as conn:
            return {f"{row.part}/{row.rank}": row.starts for row in conn.execute(query)}

    def _parts(self) -> list[str]:
        return [part for part in RANKS if not part.startswith("engine") or int(part[7:]) < self.engines]

    def can(self, fault: str) -> bool:
        """Whether the rank of a fault is one of this run's."""
        return "/" not in fault or fault.split()[1].split("/")[0] in self._parts()

    def do(self, fault: str) -> list[psutil.Process]:
        """Carry out a fault; returns the processes that must end because of it."""
        kind, _, of = fault.partition(" ")
        if fault == SUPERVISOR:
            self.kill(SUPERVISOR)
            return []
        if kind in ("stopping", "head"):
            return self._do_to_all(kind)
        guard = psutil.Process(self.ranks()[of])
        if kind in ("node", "zombie", "frozen", "partition"):
            return self._do_to_node(kind, guard.pid)
        doomed = [guard, *guard.children(recursive=True)]
        if kind == "command":
            (keeper,) = guard.children()
            keeper.children()[0].kill()
            return doomed
        runner, _, runners_guard, worker = above = guard.parents()[:4]  # the second is the keeper
        doomed += above[:3]
        assert self.nodes is not None
        if kind == "actor":
            self.nodes.kill_actor(f"agentrl:{NAME}:{of.replace('/', ':')}")
        else:
            {"runner": runner, "guard": runners_guard, "worker": worker}[kind].kill()
        return doomed

    def _do_to_all(self, kind: str) -> list[psutil.Process]:
        """Kill the supervisor while it stops the run, or Ray's head; then start again what must be started by hand."""
        assert self.process is not None
        assert self.nodes is not None
        doomed = self.leftovers()
        if kind == "head":
            self.nodes.kill_head()
        else:
            self.process.terminate()
            while not self._stops():
                time.sleep(POLL_S)
        self.process.kill()
        self.process.wait()
        self.start()
        return doomed

    def _stops(self) -> bool:
        """Whether the supervisor has asked all parts to stop."""
        with self.database.connect() as conn:
            return conn.execute(text("SELECT count(*) FROM parts WHERE wanted <> 'stopped'")).scalar() == 0

    def _do_to_node(self, kind: str, pid: int) -> list[psutil.Process]:
        """Take away the node of a process, for good or for a while, and start another one.

        Ray gives up a node that does not answer after about 65 s, so one that stands still for a while may go on.
        """
        assert self.nodes is not None
        node = self.nodes.node_of(pid)
        doomed = self.below(node)
        self.nodes.add()
        if kind == "node":
            self.nodes.kill_node(node)
        elif kind == "zombie":
            self.nodes.leave_zombie(node, STANDS_S)
        else:
            doomed = []
            (self.nodes.freeze if kind == "frozen" else self.nodes.cut)(node, STANDS_S)
        return doomed
