"""Whole runs of benchmarks: `agentrl` as a process that ends, and what its run has recorded."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

LAST = 2000
"""Characters of a log that are shown."""
Json = dict[str, Any]


def agentrl(folder: Path, log: Path, *argv: str, modules: Path | None = None) -> None:
    """Run `agentrl ARGV` to its end in a folder, with a database of its own. `modules` is a folder from which it can
    import. Raises SystemExit with the end of its log when it fails.
    """
    own = {name: value for name, value in os.environ.items() if name != "AGENTRL_DATABASE_URL"}
    if modules is not None:
        own["PYTHONPATH"] = os.pathsep.join([str(modules), *filter(None, [own.get("PYTHONPATH")])])
    with log.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", *argv],
            cwd=folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{folder.name}: agentrl {' '.join(argv)}: exit {done.returncode}\n{log.read_text()[-LAST:]}")


def published_steps(run: Path) -> dict[int, Json]:
    """Step → its metrics, of a finished run in this folder."""
    with closing(sqlite3.connect(run / "agentrl.db")) as conn:
        rows = conn.execute("SELECT step, metrics FROM steps WHERE state = 'published' ORDER BY step").fetchall()
    return {step: json.loads(metrics) for step, metrics in rows}


def sampled_evaluations(run: Path) -> list[tuple[int, Json]]:
    """The evaluations of a finished run at temperature 1: the step before each, and its figures."""
    summary: Json = json.loads((run / "summary.json").read_text())
    return [(one["step"], one["settings"]["sampled"]) for one in summary["evaluations"]]
