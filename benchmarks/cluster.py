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
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from chaos import losses
from chaos.cluster_run import FAULTS, ClusterRun
from chaos.network_hosts import HERE
from chaos.port_relay import PortRelay
from chaos.ray_nodes import Nodes
from chaos.run import SUPERVISOR, RunFailed
from crash import log_tail, new_database, postgres_version
from harness import Report
from sqlalchemy import make_url

from agentrl.console import Console

NODES = 4
STEPS_PER_FAULT = 4
STUCK_S = 420.0
MORE_STEPS = 2
POLL_S = 0.5


@dataclass(slots=True)
class Times:
    """Of each fault, in order: seconds until all that it doomed was gone, and until the run had recovered; and which
    ranks started again.
    """

    gone_s: dict[str, float] = field(default_factory=dict)
    recovered_s: dict[str, float] = field(default_factory=dict)
    started: dict[str, list[str]] = field(default_factory=dict)


def main() -> None:
    """Do the run; exits with status 1 when it lost anything or did not reach its last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2, help="engines of the run (default 2)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="faults, with commas between them (default all)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after this time")
    parser.add_argument("--engine-url", help="use this engine, and start none")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults = [fault for fault in options.faults.split(",") if fault]
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="agentrl-cluster-")).resolve()
    os.environ["PYTHONPATH"] = str(folder)  # for every process of the cluster
    started, times, failure, found = time.monotonic(), Times(), None, None

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started:5.0f} s] {text}", markup=False)

    with new_database("postgresql", folder) as (url, keep):
        nodes = Nodes(NODES)
        database = make_url(url)
        relay = PortRelay(HERE, database.host or "127.0.0.1", database.port or 5432)
        run = ClusterRun(
            folder,
            database.set(host=HERE, port=relay.port).render_as_string(False),
            0,
            STEPS_PER_FAULT * (len(faults) + 1),
            options.engine_url,
            nodes=nodes,
            engines=0 if options.engine_url else options.engines,
        )
        try:
            disturb(run, [fault for fault in faults if run.can(fault)], 60 * options.minutes, times, say)
            found = losses.check(run)
        except RunFailed as error:
            failure = str(error)
            for line in log_tail(run):
                say(line)
        finally:
            run.stop()
            nodes.stop()
        clean = found is not None and found.clean
        if found is not None:
            say(f"{sum(found.losses.values())} losses, {len(found.violations)} violations, {found.responses} responses")
        for line in [*([failure] if failure else []), *(found.details + found.violations if found else [])]:
            say(line)
        if not clean:
            keep.append(url)
            say(f"kept: {folder}, {url}")
    if clean:
        shutil.rmtree(folder)
    if options.out:
        report(run, times, found, failure, time.monotonic() - started).write(options.out)
    if not clean:
        raise SystemExit(1)


def disturb(run: ClusterRun, faults: list[str], for_s: float, times: Times, say: Callable[[str], None]) -> None:
    """Start the run, carry out the faults in turn, those that `for_s` leaves time for, and let the run finish."""
    began = time.monotonic()
    run.start()
    wait(run, lambda: run.whole() and run.position().step >= 1)
    say("all ranks run, and a step is published")
    for fault in faults:
        if time.monotonic() - began > for_s:
            break
        starts, since = run.starts(), time.monotonic()
        if left := psutil.wait_procs(run.do(fault), timeout=STUCK_S)[1]:
            raise RunFailed(f"{fault}: left behind: {left}")
        times.gone_s[fault], step = time.monotonic() - since, run.position().step
        wait(run, lambda step=step: run.whole() and run.position().step >= step + MORE_STEPS)
        times.recovered_s[fault] = time.monotonic() - since
        again = sorted(rank for rank, count in run.starts().items() if count != starts.get(rank))
        times.started[fault] = again
        say(f"{fault}: gone after {times.gone_s[fault]:.1f} s, recovered after {times.recovered_s[fault]:.1f} s")
        say(f"    at step {run.position().step}; started again: {', '.join(again) or 'nothing'}")
        if fault == SUPERVISOR and again:
            raise RunFailed(f"the supervisor did not attach: it started {again} again")
        if orphans := run.orphans():
            raise RunFailed(f"{fault}: orphans: {orphans}")
    wait(run, run.finished)


def wait(run: ClusterRun, condition: Callable[[], bool]) -> None:
    """Wait for a condition. A run that finishes before it gets more steps. Raises RunFailed if it fails or is stuck."""
    last, since = run.position(), time.monotonic()
    while not condition():
        if (now := run.position()) != last:
            last, since = now, time.monotonic()
        if time.monotonic() - since > STUCK_S:
            raise RunFailed(f"no progress for {STUCK_S:g} s; running: {sorted(run.ranks())}; {run.last_line()}")
        if condition != run.finished and run.finished():
            run.steps += STEPS_PER_FAULT
            run.start()
        time.sleep(POLL_S)


def report(run: ClusterRun, times: Times, found: losses.Findings | None, failure: str | None, wall_s: float) -> Report:
    """Times by fault as figures; losses and counts as notes."""
    notes: dict[str, object] = {
        "postgresql": postgres_version(),
        "nodes": NODES,
        "engines": run.engines,
        "steps": run.steps,
        "wall_s": round(wall_s, 1),
        "failure": failure,
        "faults": list(times.recovered_s),
        "started_again": times.started,
    }
    if found is not None:
        notes |= {"losses": found.losses, "violations": found.violations, "responses_delivered": found.responses}
        notes |= {"rewards_acknowledged": found.rewards, "trajectories_trained": found.trained}
    made = Report("cluster", notes=notes)
    for fault, seconds in times.recovered_s.items():
        made.add(f"recovered/{fault}", [seconds], "s")
        made.add(f"gone/{fault}", [times.gone_s[fault]], "s")
    return made


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
