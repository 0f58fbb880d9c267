"""Kills random processes of real training runs, on both databases: nothing may be lost, nothing may be trained twice.

    python benchmarks/crash.py --database both --seeds 0,1,2 --kills 15 --out benchmarks/results/crash.json

For each database and seed, one `agentrl train` (real SGLang, proxy, rollout worker, trainer; the tiny model) gets
`--kills` SIGKILLs at random moments: mostly to proxy, rollout worker and trainer, seldom to the engine or to the
supervisor, which is then started again. Then the run continues to its last step, and `chaos.losses` compares the
database with the agents' own ledger. PostgreSQL is the server of AGENTRL_TEST_POSTGRES_URL, else the local one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from chaos import killer, losses
from chaos.killer import Outcome
from chaos.losses import Findings
from chaos.run import SUPERVISOR, Run, RunFailed
from harness import Figure, Report
from rich.table import Table
from sqlalchemy import make_url

from agentrl.console import Console

DATABASES = ("sqlite", "postgresql")
PARTS = (*killer.FREQUENT, "engine", SUPERVISOR)
POSTGRES = "postgresql://postgres@127.0.0.1:5432/postgres"
STEPS_PER_KILL = 3
PUBLISHES: dict[str, dict[str, Any]] = {
    "default": {},
    "delta": {"publish": {"delta": "always", "anchor_every": 3}},
    "lag": {"publish": {"delta": "always", "anchor_every": 3, "lag": 1}, "resources": {"engines": {"count": 2}}},
    "paused": {"publish": {"prepare": False}},
}
"""Ways in which versions reach the engines: as by default, as deltas, also one by one, and read during the pause."""
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Result:
    """One run: its kills and its findings. `failure` says why it did not reach its last step."""

    database: str
    seed: int
    steps: int
    wall_s: float
    outcome: Outcome
    findings: Findings | None
    failure: str | None

    @property
    def clean(self) -> bool:
        """Whether the run reached its last step and lost nothing."""
        return self.failure is None and self.findings is not None and self.findings.clean


def main() -> None:
    """Do the runs, print a table, write JSON; exits with status 1 when a run lost anything or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=[*DATABASES, "both"], default="both")
    parser.add_argument("--seeds", default="0,1,2", help="one run per seed and database (default 0,1,2)")
    parser.add_argument("--kills", type=int, default=15, help="kills of one run (default 15)")
    parser.add_argument("--steps", type=int, help=f"steps of one run (default {STEPS_PER_KILL} per kill)")
    parser.add_argument("--publish", choices=PUBLISHES, default="default", help="how versions reach the engines")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit ends the processes that this one started
    databases = DATABASES if options.database == "both" else (options.database,)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    steps = options.steps or STEPS_PER_KILL * options.kills
    console = Console(highlight=False, soft_wrap=True)
    server = postgres_version() if "postgresql" in databases else None
    run = partial(one_run, kills=options.kills, steps=steps, changes=PUBLISHES[options.publish], console=console)
    results = [run(kind, seed) for seed in seeds for kind in databases]
    report = make_report(results, server)
    console.print(table(report))
    if options.out:
        report.write(options.out)
    if not all(result.clean for result in results):
        raise SystemExit(1)


def one_run(kind: str, seed: int, kills: int, steps: int, changes: dict[str, Any], console: Console) -> Result:
    """A whole run in a temporary folder, which is kept if the run failed or lost anything."""
    folder = Path(tempfile.mkdtemp(prefix=f"agentrl-crash-{kind}-{seed}-")).resolve()
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{kind} seed {seed} [{time.monotonic() - started:5.0f} s] {text}", markup=False)

    outcome, findings, failure = Outcome(), None, None
    with new_database(kind, folder) as (url, keep):
        run = Run(folder, url, seed, steps, changes=changes)
        try:
            killer.disturb(run, killer.plan(seed, kills), outcome, say)
            findings = losses.check(run)
        except RunFailed as error:
            failure = str(error)
        except (KeyboardInterrupt, SystemExit):
            run.stop()
            shutil.rmtree(folder)
            raise
        finally:
            run.stop()
        result = Result(kind, seed, run.steps, time.monotonic() - started, outcome, findings, failure)
        say(verdict(result))
        if not result.clean:
            keep.append(url)
            for line in [*(findings.details + findings.violations if findings else []), *log_tail(run)]:
                say(line)
            say(f"kept: {folder}, {make_url(url).render_as_string()}")
    if result.clean:
        shutil.rmtree(folder)
    return result


def verdict(result: Result) -> str:
    """One line about an ended run."""
    if result.findings is None:
        return f"FAILED: {result.failure}"
    found = result.findings
    return (
        f"{'ok' if result.clean else 'LOST'}: {len(result.outcome.kills)} kills, {result.steps} steps, "
        f"{found.responses} responses, {found.rewards} rewards, {found.trained} trajectories trained, "
        f"{sum(found.losses.values())} losses, {len(found.violations)} violations"
    )


def log_tail(run: Run) -> list[str]:
    """The last lines of every log of a run."""
    files = [run.log, *sorted(run.folder.glob("runs/*/logs/*.log"))]
    return [
        f"{file.name}: {line}"
        for file in files
        if file.exists()
        for line in file.read_text(errors="replace").splitlines()[-LOG_LINES:]
    ]


@contextmanager
def new_database(kind: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL of an empty database, and a list. The database is dropped unless its URL is in the list at the end."""
    keep: list[str] = []
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'store.db'}", keep
        return
    name = f"agentrl_crash_{uuid4().hex[:12]}"
    with postgres() as conn:
        conn.execute(f'CREATE DATABASE "{name}"')
    url = make_url(admin_url()).set(drivername="postgresql+psycopg", database=name).render_as_string(False)
    try:
        yield url, keep
    finally:
        if url not in keep:
            with postgres() as conn:
                conn.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def admin_url() -> str:
    """The URL of the server's database for administration, to create databases from."""
    return os.environ.get("AGENTRL_TEST_POSTGRES_URL") or POSTGRES


def postgres() -> psycopg.Connection:
    """A connection to the server, in autocommit mode."""
    return psycopg.connect(admin_url().replace("+psycopg", "", 1), autocommit=True, connect_timeout=5)


def postgres_version() -> str:
    """The server's version; exits with one line when there is none."""
    try:
        with postgres() as conn:
            return str(conn.info.parameter_status("server_version"))
    except psycopg.OperationalError as error:
        raise SystemExit(f"no PostgreSQL server at {admin_url()}: {' '.join(str(error).split())}") from error


def make_report(results: Sequence[Result], server: str | None) -> Report:
    """The report: a summary of each database as notes, counts and recovery times as figures."""
    by_database = {kind: [r for r in results if r.database == kind] for kind in DATABASES}
    databases = {kind: summary(of_kind) for kind, of_kind in by_database.items() if of_kind}
    notes: dict[str, object] = {"sqlite": sqlite3.sqlite_version, "postgresql": server, "databases": databases}
    report = Report("crash", figures=list(counts(results)), notes=notes)
    for part in PARTS:
        times = [seconds for r in results for name, seconds in r.outcome.recovery_s if name == part]
        if times:
            report.add(f"recovery/{part}", times, "s")
    return report


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """The runs of one database."""
    kills = Counter(kill.part for r in results for kill in r.outcome.kills)
    findings = [r.findings for r in results if r.findings is not None]
    return {
        "seeds": [r.seed for r in results],
        "runs": len(results),
        "runs_at_their_last_step": sum(f.losses["missing_steps"] == 0 for f in findings),
        "kills": {part: kills[part] for part in PARTS} | {"total": kills.total()},
        "steps": sum(r.steps for r in results),
        "responses_delivered": sum(f.responses for f in findings),
        "rewards_acknowledged": sum(f.rewards for f in findings),
        "trajectories_trained": sum(f.trained for f in findings),
        "losses": {kind: sum(f.losses[kind] for f in findings) for kind in losses.KINDS},
        "violations": sum(len(f.violations) for f in findings),
        "wall_s": round(sum(r.wall_s for r in results), 1),
        "failures": [f"seed {r.seed}: {r.failure}" for r in results if r.failure],
        "timeline": [[str(kill) for kill in r.outcome.kills] for r in results],
    }


def counts(results: Sequence[Result]) -> Iterator[Figure]:
    """Kills by part, losses and violations of each database: totals, with the least and the most of one run."""
    for kind in dict.fromkeys(r.database for r in results):
        of_kind = [r for r in results if r.database == kind]
        found = [r.findings for r in of_kind if r.findings is not None]
        by_run = {f"kills/{kind}": [len(r.outcome.kills) for r in of_kind]}
        for part in PARTS:
            by_run[f"kills/{kind}/{part}"] = [sum(k.part == part for k in r.outcome.kills) for r in of_kind]
        by_run[f"losses/{kind}"] = [sum(f.losses.values()) for f in found]
        by_run[f"violations/{kind}"] = [len(f.violations) for f in found]
        for name, numbers in by_run.items():
            if numbers:
                yield Figure(name, sum(numbers), "count", None, None, min(numbers), max(numbers), len(numbers))


def table(report: Report) -> Table:
    """The report for the terminal: one column per database."""
    columns: Any = report.notes["databases"]
    shown = Table("kill -9", *columns)
    for part in (*PARTS, "total"):
        shown.add_row(f"kills: {part}", *(str(c["kills"][part]) for c in columns.values()))
    for name in ("runs", "runs_at_their_last_step", "steps", "responses_delivered", "rewards_acknowledged"):
        shown.add_row(name.replace("_", " "), *(str(c[name]) for c in columns.values()))
    for kind in losses.KINDS:
        shown.add_row(f"lost: {kind.replace('_', ' ')}", *(str(c["losses"][kind]) for c in columns.values()))
    for name in ("violations", "wall_s"):
        shown.add_row(name, *(str(c[name]) for c in columns.values()))
    return shown


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
