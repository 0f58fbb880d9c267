"""A publish to many simulated engines: requests and statements of an engine, and rounds of loads.

A load takes one round of simulated time: a round ends when as many engines load as a publish updates at once, or all
that are left.
"""

from __future__ import annotations

import asyncio
import time

import harness

from agentrl.domain.schemas import VersionState
from agentrl.proxy.engines import publishing
from agentrl.proxy.engines.waves import spare
from agentrl.store.tables import weight_versions
from fleets.simulated import Loads, Simulation

BEFORE = {"requests per engine": 8.0, "statements per engine": 9.0}
"""Measured when engines were updated one after another."""
TIMEOUT_S = 600.0


async def publish(report: harness.Report, simulation: Simulation) -> None:
    """Publish a version from one replica. Ends the program when the counts exceed their bounds."""
    name, pool = next(iter(simulation.pools.items()))
    row = {"run_id": simulation.run_id, "version": 1, "parent_version": 0, "step": 1, "created_at": 0.0}
    insert = weight_versions.insert().values(**row, path=str(simulation.model), state=VersionState.PENDING)
    simulation.database.transact(lambda conn: conn.execute(insert))
    n_engines = len(pool.engines)
    width = min(pool.pace.parallel, spare(n_engines, pool.pace.serving_share))
    simulation.loads = loads = Loads(n_engines, width)
    simulation.counts.take()
    started = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S):
        await publishing.publish(simulation.stores[name], pool, 1)
    took = time.perf_counter() - started
    counts = simulation.counts.take()
    found = {
        "requests per engine": counts["requests"] / n_engines,
        "statements per engine": counts["statements"] / n_engines,
        "rounds": float(loads.rounds),
    }
    before = BEFORE | {"rounds": float(n_engines)}
    title = f"publish to {n_engines} engines"
    for what, value in found.items():
        report.add(f"{title}: {what}/before", [before[what]], "")
        report.add(f"{title}: {what}/now", [value], "", f"{title}: {what}/before")
    report.add(f"{title}: time of the proxy and the store per engine", [1e3 * took / n_engines], "ms")
    if (
        found["requests per engine"] > 8
        or found["statements per engine"] > 4.1
        or loads.rounds > -(-n_engines // width)
    ):
        raise SystemExit(f"a publish costs more than it should: {found}")
