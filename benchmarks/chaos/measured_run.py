"""A benchmark of one training run over several hosts: its folder and database, its losses, its report."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from crash import log_tail, new_database, postgres_version
from harness import Report

from agentrl.console import Console
from chaos import losses
from chaos.cluster_run import ClusterRun
from chaos.run import RunFailed

R = TypeVar("R", bound=ClusterRun)
Say = Callable[[str], None]


def measure(
    report: Report, make: Callable[[Path, str, ExitStack], R], disturb: Callable[[R, Say], None], out: Path | None
) -> None:
    """Do a run on PostgreSQL, check that it lost nothing, and write the report to `out`.

    make      makes the run from its folder and the URL of its database; what it adds to the stack is closed at the end
    disturb   starts the run, does its faults, and waits until it has finished

    Folder and database are kept if the run failed or lost anything; then the program exits with status 1.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(highlight=False, soft_wrap=True)
    report.notes["postgresql"] = postgres_version()
    folder = Path(tempfile.mkdtemp(prefix=f"agentrl-{report.benchmark}-")).resolve()
    os.environ["PYTHONPATH"] = str(folder)  # every process of the run imports the agent from there
    started, failure, found = time.monotonic(), None, None

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - started:5.0f} s] {text}", markup=False)

    with new_database("postgresql", folder) as (url, keep), ExitStack() as hosts:
        run = make(folder, url, hosts)
        try:
            disturb(run, say)
            found = losses.check(run)
        except RunFailed as error:
            failure = str(error)
            for line in [failure, *log_tail(run)]:
                say(line)
        finally:
            run.stop()
        clean = found is not None and found.clean
        if found is not None:
            say(f"{sum(found.losses.values())} losses, {len(found.violations)} violations, {found.responses} responses")
            for line in found.details + found.violations:
                say(line)
        if not clean:
            keep.append(url)
            say(f"kept: {folder}, {url}")
    if clean:
        shutil.rmtree(folder)
    report.notes |= {"failure": failure, "steps": run.steps, "wall_s": round(time.monotonic() - started, 1)}
    if found is not None:
        report.notes |= {"losses": found.losses, "violations": found.violations}
        report.notes |= {"responses_delivered": found.responses, "rewards_acknowledged": found.rewards}
        report.notes["trajectories_trained"] = found.trained
    if out:
        report.write(out)
    if not clean:
        raise SystemExit(1)
