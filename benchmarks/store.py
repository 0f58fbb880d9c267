"""Measures the cost of the store, on SQLite and PostgreSQL: recording, leases and dashboards at scale, batches, bytes.

    python benchmarks/store.py --out benchmarks/results/store.json

- record: CPU and rows per second of the recorder (the proxy's path: two group commits a call) against the raw driver
  (the same statements by executemany in batches of 64, with and without packing), and a commit per row of either. A row
  is a call of 512 prompt and 256 output tokens with its messages. Everything is fully durable.
- bytes_per_turn: the bulk columns, packed against JSON text.
- lease_256, dashboard: the same queries on runs of 10k, 100k and 1M trajectories; the lease is rolled back each time.
- batch_256_to_padded: a leased batch of 256 trajectories from rows to padded arrays, against the same stored as JSON.
- leasers_8: eight processes empty one pool of ready groups; the run fails if a group is claimed twice or forgotten.

PostgreSQL is the server that AGENTRL_TEST_POSTGRES_URL names, else the one on the local standard port.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from storage import filled, record, scale

from agentrl.store import Database
from agentrl.store.db import codec

POSTGRES = os.environ.get("AGENTRL_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
SIZES = (10_000, 100_000, 1_000_000)


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rounds=(int, 7, "rounds of each variant"),
        largest=(int, SIZES[-1], "trajectories of the largest run"),
        databases=(str, "sqlite,postgresql", "which databases"),
    )
    report = harness.Report("store")
    record.measure_bytes(report)
    for backend in options.databases.split(","):
        with fresh(backend) as database:
            record.measure(report, database, rounds=options.rounds, batches=8)
        with filled_stores(backend, [n for n in SIZES if n <= options.largest]) as sizes:
            scale.measure_growth(report, sizes, rounds=3 * options.rounds)
            smallest, largest = sizes[min(sizes)], sizes[max(sizes)]
            scale.measure_batch(report, *smallest, rounds=options.rounds)
            scale.measure_leasers(report, *largest)
    harness.finish(report, options.out)


@contextmanager
def filled_stores(backend: str, sizes: list[int]) -> Iterator[dict[int, tuple[Database, str]]]:
    """Open one store per size, smallest first, until the block ends."""
    if not sizes:
        yield {}
        return
    with fresh(backend) as database, filled_stores(backend, sizes[1:]) as larger:
        print(f"filling {backend} with {sizes[0]:,} trajectories")
        yield {sizes[0]: (database, filled.fill(database, sizes[0])), **larger}


@contextmanager
def fresh(backend: str) -> Iterator[Database]:
    """An empty store, removed afterwards."""
    if backend == "sqlite":
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
            yield from _opened(f"sqlite:///{Path(folder) / 'store.db'}")
        return
    name = f"agentrl_bench_{codec.new_id()}"
    admin = create_engine(make_url(POSTGRES).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.execute(text(f"CREATE DATABASE {name}"))
    try:
        yield from _opened(make_url(POSTGRES).set(database=name).render_as_string(hide_password=False))
    finally:
        with admin.connect() as conn:
            conn.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        admin.dispose()


def _opened(url: str) -> Iterator[Database]:
    database = Database(url)
    database.upgrade()
    try:
        yield database
    finally:
        database.close()


if __name__ == "__main__":
    main()
