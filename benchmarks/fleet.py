"""Measures what a large fleet costs: requests to engines, queries, how fast replicas agree, sessions, publishes.

    AGENTRL_TEST_POSTGRES_URL=… nice python benchmarks/fleet.py --out benchmarks/results/fleet.json

- E engines, R replicas: requests, statements and rows of engines of a second in which nothing happens, of all replicas
  together. Before, each replica probed every engine (two requests, one query) and read every row: 2·E·R requests,
  R·(E + 1) statements, E·R rows; these are computed. What it is now is measured with the real pools over PostgreSQL
  and engines that are objects. Of 100 replicas 10 run, and the totals are ten times theirs.
- drop, see: simulated seconds until every replica has dropped an engine that died, with or without a call that fails
  on it (a probe by any replica stands for the call), and until every replica uses one that joined. Each replica reads
  once a second, each at its own time.
- sessions: choosing an engine for each of 100,000 sessions, and for a later call of it; how evenly they are spread.
- publish: requests and statements per engine of a publish from a folder, and rounds of loads, one after another, where
  a load takes as long in every engine. Before, engines were updated one after another.
- proxies: real `agentrl proxy` processes over real sockets: requests, transactions, seconds until all drop an engine
  that was killed under no load and use one that joined, and how long the admission of a group takes, without and with
  100,000 open sessions in the store.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import proxied
from fleets import fan_out, processes
from fleets.simulated import SimulatedEngine, Simulation
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from agentrl.models import resolve_model
from agentrl.proxy.engines.engine_state import EngineState
from agentrl.store import Database, fleet

POSTGRES = os.environ.get("AGENTRL_TEST_POSTGRES_URL", "postgresql://postgres@127.0.0.1:5432/postgres")
SIZES = [(100, 1, 1), (100, 2, 2), (100, 10, 10), (1000, 2, 2), (1000, 10, 10), (5000, 100, 10)]
"""Engines, replicas, and how many of the replicas run."""
SESSIONS = 100_000


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        rounds=(int, 8, "events that are timed"),
        proxies=(int, 3, "real proxies"),
        engines=(int, 100, "engines of the real proxies"),
    )
    report, model = harness.Report("fleet"), resolve_model("tiny")
    report.notes["before"] = "computed: 2·E·R requests, R·(E + 1) statements and E·R rows of a second"
    for n_engines, n_replicas, n_pools in SIZES:
        with fresh(model) as (database, run_id):
            simulation = Simulation(database, run_id, model, n_replicas, n_pools)
            asyncio.run(steady(report, simulation, n_engines))
            if (n_engines, n_replicas) == (100, 10):
                asyncio.run(events(report, simulation, options.rounds))
            if (n_engines, n_replicas) == (1000, 2):
                asyncio.run(sessions(report, simulation))
                asyncio.run(fan_out.publish(report, simulation))
        if options.out is not None:
            report.write(options.out)
    with fresh(model) as (database, _), tempfile.TemporaryDirectory() as folder:
        measured = processes.measure(database.url, Path(folder), options.proxies, options.engines)
        name = f"proxies/{options.proxies} over {options.engines} engines"
        for figure, (samples, unit) in measured.items():
            report.add(f"{name}: {figure}", samples, unit)
    harness.finish(report, options.out)


@contextmanager
def fresh(model: Path) -> Iterator[tuple[Database, str]]:
    """A PostgreSQL database of its own with one run."""
    server = create_engine(make_url(POSTGRES).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    name = f"bench_fleet_{os.getpid()}"
    with server.connect() as conn:
        conn.execute(text(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
        conn.execute(text(f"CREATE DATABASE {name}"))
    database = Database(make_url(POSTGRES).set(database=name).render_as_string(hide_password=False))
    try:
        database.upgrade()
        sections = {"rollout": {"max_concurrent_groups": 4096}, "trainer": {"groups_per_step": 4096}}
        yield database, proxied.create_run(database, model, **sections)
    finally:
        database.close()
        with server.connect() as conn:
            conn.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
        server.dispose()


async def steady(report: harness.Report, simulation: Simulation, n_engines: int) -> None:
    """A second in which nothing happens, some seconds after the start."""
    await simulation.join(n_engines)
    await asyncio.sleep(fleet.OVERLAP_S + 1)  # later reads do not repeat the changes of the start
    await simulation.second()
    share = simulation.n_replicas / simulation.n_pools
    found: dict[str, list[float]] = {"requests": [], "statements": [], "rows": []}
    for _ in range(3):
        simulation.counts.take()
        await simulation.second()
        for what, count in simulation.counts.take().items():
            beats = 1 if what == "statements" else 0  # the heartbeats are one batch here
            found[what].append(share * max(0, count - beats * simulation.n_replicas))
    n_replicas, name = simulation.n_replicas, f"{n_engines} engines, {simulation.n_replicas} replicas"
    old = {
        "requests": 2 * n_engines * n_replicas,
        "statements": n_replicas * (n_engines + 1),
        "rows": n_engines * n_replicas,
    }
    for what, samples in found.items():
        report.add(f"{name}: {what}/before", [float(old[what])], "per s")
        report.add(f"{name}: {what}/now", samples, "per s", f"{name}: {what}/before")


async def events(report: harness.Report, simulation: Simulation, rounds: int) -> None:
    """How fast all replicas drop an engine that died, and use one that joined."""
    draw, times = random.Random(1), {"drop, one call failed": [], "drop, no call": [], "see a new engine": []}
    for n in range(rounds):
        for name, samples in times.items():
            url = draw.choice(list(simulation.engines))
            if name.startswith("see"):
                url = f"http://10.9.0.{n}:30000"
                simulation.engines[url] = SimulatedEngine(url)
                simulation.database.transact(fleet.join, simulation.run_id, url, 3600.0, "bench")
                samples.append(await simulation.time_until(lambda u=url: all_see(simulation, u, EngineState.SERVING)))
                continue
            simulation.engines[url].dead = True
            if name.endswith("failed"):
                caller = simulation.pools[draw.choice(list(simulation.pools))]
                engine = next(engine for engine in caller.engines if engine.url == url)
                await caller.probe(engine)
            samples.append(await simulation.time_until(lambda u=url: all_see(simulation, u, EngineState.DEAD)))
            simulation.engines[url].dead = False
            await simulation.time_until(lambda u=url: all_see(simulation, u, EngineState.SERVING))
    for name, samples in times.items():
        report.add(f"100 engines, 10 replicas: {name}", samples, "s")


def all_see(simulation: Simulation, url: str, state: EngineState) -> bool:
    """Whether all replicas have an engine in this state."""
    return all(simulation.sees(name, url, state) for name in simulation.pools)


async def sessions(report: harness.Report, simulation: Simulation) -> None:
    """Choose an engine for the calls of many sessions at one replica, and see how they are spread."""
    pool = next(iter(simulation.pools.values()))
    first, later, chosen = [], [], {}
    for n in range(SESSIONS):
        started = time.perf_counter()
        engine = await pool.acquire(f"session-{n}", time.monotonic() + 60)
        first.append(1e6 * (time.perf_counter() - started))
        started = time.perf_counter()
        pool.release(await pool.acquire(f"session-{n}", time.monotonic() + 60))
        later.append(1e6 * (time.perf_counter() - started))
        chosen[engine.url] = chosen.get(engine.url, 0) + 1
    for engine in pool.engines:
        engine.running = 0
    report.add("100,000 sessions, 1000 engines: choose for a new session", first, "µs")
    report.add("100,000 sessions, 1000 engines: choose for a later call", later, "µs")
    report.add("100,000 sessions, 1000 engines: most on one engine", [float(max(chosen.values()))], "sessions")


if __name__ == "__main__":
    main()
