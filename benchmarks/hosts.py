"""A training run over two hosts that share no network but one link: an engine and the trainer have a rank on each.

    python benchmarks/hosts.py --out benchmarks/results/hosts.json

The hosts are network namespaces with an address and shared memory of their own (`chaos.network_hosts`); it needs root.
The engine is one real SGLang server with a tensor-parallel rank on each host, the trainer one torchrun with a rank on
each; two proxies and two rollout workers are divided between them, and PostgreSQL is reached over the bridge. First the
run goes on for some steps; then the second host's rank of the engine is killed, and after its recovery that of the
trainer. A gang restarts as a whole, and `chaos.losses` compares the database with the agents' own ledger at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from chaos import process_scheduler
from chaos.cluster_run import ClusterRun
from chaos.measured_run import Say, measure
from chaos.network_hosts import HostNetwork
from chaos.port_relay import bridged
from chaos.process_scheduler import NAMESPACES
from chaos.run import Run, RunFailed
from harness import Report
from sqlalchemy import text

N_HOSTS = 2
KILLED = ("engine-0/1", "trainer/1")
STEPS_PER_FAULT = 3
PARTS = {"engine-0": 2, "proxy": 2, "rollout": 2, "trainer": 2}


@dataclass
class HostsRun(ClusterRun):
    """A run with a scheduler whose hosts are the namespaces. The supervisor is outside of them."""

    engines: int = 1
    stuck_s: float = 600.0
    namespaces: tuple[str, ...] = ()

    def _config(self) -> dict[str, Any]:
        made = super()._config()  # `placement` is any but local
        made["resources"]["engines"] = {"tensor": 2, "hosts": 2}
        return made

    def start(self) -> None:
        """Start the supervisor."""
        self.launch([sys.executable, process_scheduler.__file__], {NAMESPACES: ",".join(self.namespaces)})

    def extend(self) -> None:
        """Each fault needs steps behind it. Raises RunFailed."""
        raise RunFailed("the run finished before its faults")

    def leftovers(self) -> list[psutil.Process]:
        """Processes of the run that still exist."""
        return Run.leftovers(self)

    def whole(self) -> bool:
        """Whether every rank runs and has a lease."""
        return len(self.ranks()) == sum(PARTS.values())

    def places(self) -> dict[str, str]:
        """Rank → the address of its host."""
        query = text("SELECT part, rank, address FROM part_ranks ORDER BY part, rank")
        with self.database.connect() as conn:
            return {f"{row.part}/{row.rank}": row.address for row in conn.execute(query)}


def main() -> None:
    """Do the run; exits with status 1 when it lost anything or did not reach its last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("this benchmark makes network namespaces: it needs root and the command `ip` (iproute2)")
    report = Report("hosts", notes={"hosts": N_HOSTS})

    def make(folder: Path, url: str, hosts: ExitStack) -> HostsRun:
        network = HostNetwork()
        hosts.callback(network.close)
        namespaces = tuple(network.add().name for _ in range(N_HOSTS))
        return HostsRun(folder, bridged(url), 0, STEPS_PER_FAULT * (len(KILLED) + 1), namespaces=namespaces)

    measure(report, make, lambda run, say: disturb(run, report, say), options.out)


def disturb(run: HostsRun, report: Report, say: Say) -> None:
    """Start the run, kill a rank of each gang in turn, and let the run finish."""
    since = time.monotonic()
    run.start()
    run.wait(lambda: run.whole() and run.position().step >= 1)
    report.add("first_step", [time.monotonic() - since], "s")
    report.notes["addresses"] = places = run.places()
    say("a step is published; " + ", ".join(f"{rank} at {address}" for rank, address in places.items()))
    for rank in KILLED:
        part = rank.partition("/")[0]
        gang = sorted(name for name in places if name.startswith(part))
        if len({places[name] for name in gang}) != N_HOSTS:
            raise RunFailed(f"the ranks of {part} are on one host: {places}")
        step, since, before = run.position().step, time.monotonic(), run.starts()
        psutil.Process(run.ranks()[rank]).kill()
        run.wait(lambda gang=gang, before=before: all(run.starts()[name] > before[name] for name in gang))
        run.wait(lambda step=step: run.whole() and run.position().step >= step + 2)
        report.add(f"recovered/{rank}", [time.monotonic() - since], "s")
        report.notes[f"restarted/{rank}"] = again = sorted(
            name for name, starts in run.starts().items() if starts > before[name]
        )
        say(f"{rank} killed: {', '.join(again)} started again; recovered after {time.monotonic() - since:.1f} s")
        if again != gang:
            raise RunFailed(f"{rank} was killed, and {again} started again")
    run.wait(run.finished)


if __name__ == "__main__":
    main()
