"""A training run on a Ray cluster of simulated nodes, with one fault after another: nothing may be lost.

    python benchmarks/cluster.py --out benchmarks/results/cluster.json

One `agentrl train` with `placement: ray` on PostgreSQL: engines (real SGLang, the tiny model), two proxies, two rollout
workers, and a trainer of two ranks on two nodes. Each node is a network namespace, so this needs root. While the run
goes on, the faults of `chaos.cluster_run` happen in turn, each after the run has recovered from the one before: all
that it doomed is gone, all ranks run, two more steps are published, and no process is without a node. Then the run
continues to its last step, and `chaos.losses` compares the database with the ledger of the agents.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos.cluster_run import FAULTS, ClusterRun
from chaos.measured_run import Say, measure
from chaos.port_relay import bridged
from chaos.ray_nodes import Nodes
from chaos.run import SUPERVISOR, RunFailed
from harness import Report

NODES = 4
STEPS_PER_FAULT = 4
MORE_STEPS = 2


@dataclass(slots=True)
class Times:
    """Adds to the report, fault by fault: the times, and which ranks started again."""

    report: Report
    started_again: dict[str, list[str]] = field(default_factory=dict)

    def add(self, fault: str, gone_s: float, recovered_s: float, started_again: list[str]) -> None:
        """Seconds until all that the fault doomed was gone, and until the run had recovered."""
        self.report.add(f"recovered/{fault}", [recovered_s], "s")
        self.report.add(f"gone/{fault}", [gone_s], "s")
        self.started_again[fault] = started_again
        self.report.notes |= {"faults": list(self.started_again), "started_again": self.started_again}


def main() -> None:
    """Do the run; exits with status 1 when it lost anything or did not reach its last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2, help="engines of the run (default 2)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="faults, with commas between them (default all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after this time")
    parser.add_argument("--engine-url", help="use this engine, and start none")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    faults = [fault for fault in options.faults.split(",") if fault]
    times = Times(Report("cluster", notes={"nodes": NODES}))

    def make(folder: Path, url: str, hosts: ExitStack) -> ClusterRun:
        nodes = Nodes(NODES)
        hosts.callback(nodes.stop)
        steps = STEPS_PER_FAULT * (len(faults) + 1)
        engines = 0 if options.engine_url else options.engines
        times.report.notes["engines"] = engines
        return ClusterRun(folder, bridged(url), 0, steps, options.engine_url, nodes=nodes, engines=engines)

    measure(times.report, make, lambda run, say: disturb(run, faults, 60 * options.minutes, times, say), options.out)


def disturb(run: ClusterRun, faults: list[str], for_s: float, times: Times, say: Say) -> None:
    """Start the run, carry out the faults in turn, those that `for_s` leaves time for, and let the run finish."""
    began = time.monotonic()
    run.start()
    run.wait(lambda: run.whole() and run.position().step >= 1)
    say("all ranks run, and a step is published")
    for fault in filter(run.can, faults):
        if time.monotonic() - began > for_s:
            break
        starts, since = run.starts(), time.monotonic()
        if left := psutil.wait_procs(run.do(fault), timeout=run.stuck_s)[1]:
            raise RunFailed(f"{fault}: left behind: {left}")
        gone_s, step = time.monotonic() - since, run.position().step
        run.wait(lambda step=step: run.whole() and run.position().step >= step + MORE_STEPS)
        again = sorted(rank for rank, count in run.starts().items() if count != starts.get(rank))
        times.add(fault, gone_s, time.monotonic() - since, again)
        say(f"{fault}: gone after {gone_s:.1f} s, recovered after {time.monotonic() - since:.1f} s")
        say(f"    at step {run.position().step}; started again: {', '.join(again) or 'nothing'}")
        if fault == SUPERVISOR and again:
            raise RunFailed(f"the supervisor did not attach: it started {again} again")
        if orphans := run.orphans():
            raise RunFailed(f"{fault}: orphans: {orphans}")
    run.wait(run.finished)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
