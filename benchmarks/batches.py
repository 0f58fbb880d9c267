"""Measures the way of a batch from the lease to the first forward pass, on one rank and on several.

    python benchmarks/batches.py --out benchmarks/results/batches.json --before FOLDER
    python benchmarks/batches.py --groups 4 --tokens 256 --rounds 1

The store holds a batch of random tokens: groups of 16 trajectories, which share a quarter of their tokens as a prompt
and have three calls each. No model is loaded. Ranks have one thread each, on one machine.

- `seconds/SIZE/DATABASE/VARIANT/N`: from the lease until all of N ranks could begin their first forward pass.
- `peak_memory/SIZE/DATABASE/VARIANT/N`: the largest resident memory of a rank meanwhile, without what it had before.
- `lease`, `read`, `build/…`: rank 0's part of the time: waiting for the batch's outlines, reading tokens, packing and
  the first microbatch. In the variant `before`, `lease` reads all tokens, `read` sends them to all ranks, and `build`
  makes all microbatches.

VARIANT is `shares`, this commit, or `before`, the package in the folder `--before`: a checkout of an earlier commit.
SIZE is GROUPSxTRAJECTORIESxTOKENS; `--compared` groups are measured with both variants.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
from batch_reads.filled_batch import Size, config_of, fill
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from agentrl.store import Database

HERE = Path(__file__).parent
POSTGRES = os.environ.get("AGENTRL_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
GROUP_SIZE = 16
MIB = 2**20


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rounds=(int, 3, "rounds of each figure"),
        groups=(int, 512, "groups of the large batch"),
        compared=(int, 64, "groups of the batch that is also measured with --before"),
        tokens=(int, 8192, "of a trajectory, a multiple of 16"),
        ranks=(str, "1,2,4", "numbers of ranks"),
        databases=(str, "sqlite,postgresql", "which databases"),
        before=(str, "", "folder of an earlier commit"),
    )
    report = harness.Report("batches")
    report.notes["before"] = _commit(options.before) if options.before else None
    ranks = [int(n) for n in options.ranks.split(",")]
    for groups in sorted({options.compared, options.groups}):
        size = Size(groups, GROUP_SIZE, options.tokens)
        both = bool(options.before) and groups == options.compared
        for kind in options.databases.split(","):
            with stored(kind, size) as (url, config):
                measure(report, f"{groups}x{GROUP_SIZE}x{options.tokens}/{kind}", url, config, ranks, options, both)
    harness.finish(report, options.out)


def measure(
    report: harness.Report, name: str, url: str, config: Path, ranks: list[int], options: Any, both: bool
) -> None:
    """Measure all variants of one batch, which take turns."""
    variants = {"shares": str(HERE.parent)} | ({"before": options.before} if both else {})
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for _ in range(options.rounds):
        for n in ranks:
            for variant, folder in variants.items():
                found.setdefault(f"{variant}/{n}", []).append(ranks_of(folder, url, config, n))
    for one in sorted(found, key=lambda key: (int(key.rpartition("/")[2]), key)):
        taken = found[one]
        base = f"before/{one.rpartition('/')[2]}"
        to = base if both and one != base else None
        seconds, memory = f"seconds/{name}", f"peak_memory/{name}"
        slowest = [max(r["seconds"] for r in round_) for round_ in taken]
        report.add(f"{seconds}/{one}", slowest, "s", f"{seconds}/{to}" if to else None)
        peaks = [max(r["peak"] - r["before"] for r in round_) / MIB for round_ in taken]
        report.add(f"{memory}/{one}", peaks, "MiB", f"{memory}/{to}" if to else None)
        for part in ("lease", "read", "build"):
            report.add(f"{part}/{name}/{one}", [round_[0]["parts"][part] for round_ in taken], "s")


def ranks_of(folder: str, url: str, config: Path, ranks: int) -> list[dict[str, Any]]:
    """What each of some ranks measured, with the package in `folder`."""
    places = {"WORLD_SIZE": ranks, "MASTER_PORT": free_port(), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "batch_reads" / "first_forward.py"), url, str(config)],
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=os.environ
            | {key: str(value) for key, value in places.items()}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": folder},
        )
        for rank in range(ranks)
    ]
    out = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"a rank ended with {[process.returncode for process in started]}")
    found: list[dict[str, Any]] = json.loads(out[0].splitlines()[-1])
    print(url.split(":")[0], folder, ranks, [round(r["seconds"], 2) for r in found], file=sys.stderr, flush=True)
    return found


@contextmanager
def stored(kind: str, size: Size) -> Iterator[tuple[str, Path]]:
    """The URL of a database with the batch, and the file of its run's configuration, until the block ends."""
    with tempfile.TemporaryDirectory() as folder, database_of(kind, folder) as url:
        config = config_of(size, folder)
        file = Path(folder) / "config.json"
        file.write_text(config.model_dump_json(exclude_unset=True))
        database = Database(url)
        database.upgrade()
        fill(database, size, config)
        database.close()
        yield url, file


@contextmanager
def database_of(kind: str, folder: str) -> Iterator[str]:
    """An empty database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder}/store.db"
        return
    server = make_url(POSTGRES).set(drivername="postgresql+psycopg")
    admin = create_engine(server, isolation_level="AUTOCOMMIT")
    name = f"batches_{os.getpid()}"
    with admin.connect() as conn:
        conn.execute(text(f'CREATE DATABASE "{name}"'))
    try:
        yield server.set(database=name).render_as_string(hide_password=False)
    finally:
        with admin.connect() as conn:
            conn.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
        admin.dispose()


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _commit(folder: str) -> str:
    asked = ["git", "-C", folder, "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
