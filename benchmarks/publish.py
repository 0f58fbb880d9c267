"""Measures publishes by transport and size: their duration, and how long an engine is paused.

    python benchmarks/publish.py --out benchmarks/results/publish.json
    python benchmarks/publish.py --fleets tiny

The engines are real SGLang behind the real proxy. The trainer's own publisher, in this process, publishes one version
after another, each with new values for all weights of the model. The transports take turns. The folder of a version is
written before its publish is timed, since the trainer always writes it; `write_s` is the time for that. A FLEET is one
engine of a model, one engine with another type (`tiny-bfloat16`), or several engines (`tiny-x2`).

- `publish_s/FLEET/TRANSPORT`: from the trainer's request to its answer. `disk_unverified`: without comparing digests.
- `stall_s/FLEET/TRANSPORT`: the longest pause of an engine during the publish.
- `bytes_per_s/FLEET/TRANSPORT`: the version's bytes over the seconds of its publish.
- `write_s/FLEET`: the time to write the folder and compute its checksum.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import harness
import torch
from proxied import start_proxy, until_healthy

from agentrl.configs.publish_config import PublishConfig
from agentrl.configs.trainer_config import LoraConfig
from agentrl.domain.schemas import VersionState
from agentrl.engine.server_process import EngineSpec, free_port, launch, pick_device
from agentrl.models import resolve_model
from agentrl.store import Database, events, runs
from agentrl.store.tables import weight_versions
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.weights.version_writer import VersionWriter

VARIANTS: dict[str, dict[str, Any]] = {
    "disk": {},
    "disk_unverified": {"verify": False},
    "distributed": {"transport": "distributed"},
    "tensor": {"transport": "tensor"},
}
FLEETS = "tiny,smollm2,smollm2-bfloat16,smollm2-x2"
STOP_S = 20.0


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 5, "publishes by each transport"), fleets=(str, FLEETS, "what to measure")
    )
    report = harness.Report("publish")
    with join_world() as world:
        for name in options.fleets.split(","):
            measure(report, name, options.rounds, world)
    harness.finish(report, options.out)


def measure(report: harness.Report, name: str, rounds: int, world: World) -> None:
    """Measure all transports with one fleet."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), Fleet.named(name), world) as run:
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        stalls: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        writes: list[float] = []
        n_bytes = 0
        publishers = {variant: partial(run.publish, variant) for variant in VARIANTS}
        for round_ in range(-1, rounds):
            for variant, publish in publishers.items():
                took = publish()
                print(f"{name:<16} {variant:<16} {took.publish_s:7.3f} s, still {took.stall_s:7.3f} s", flush=True)
                if round_ >= 0:
                    seconds[variant].append(took.publish_s)
                    stalls[variant].append(took.stall_s)
                    writes.append(took.write_s)
                    n_bytes = took.n_bytes
    report.notes[f"bytes/{name}"] = n_bytes
    report.compare(f"publish_s/{name}", seconds, "s", "disk")
    report.compare(f"stall_s/{name}", stalls, "s", "disk")
    report.compare(
        f"bytes_per_s/{name}",
        {v: [n_bytes / s / 2**20 for s in taken] for v, taken in seconds.items()},
        "MiB/s",
        "disk",
    )
    report.add(f"write_s/{name}", writes, "s")


@dataclass(frozen=True)
class Fleet:
    """Engines of one model."""

    model: Path
    dtype: str = "float32"
    count: int = 1

    @classmethod
    def named(cls, name: str) -> Fleet:
        """The fleet that has this name in FLEETS."""
        model, _, kind = name.partition("-")
        folder = resolve_model(model)
        if kind.startswith("x"):
            return cls(folder, count=int(kind[1:]))
        return cls(folder, kind or "float32")


@dataclass(frozen=True)
class Took:
    """The durations and the size of one publish."""

    write_s: float
    publish_s: float
    stall_s: float
    n_bytes: int


@dataclass
class Run:
    """A run that versions are published to, as the trainer does."""

    url: str
    database: Database
    run_id: str
    fleet: Fleet
    folder: Path
    policy: Policy
    world: World
    version: int = 0

    def publish(self, variant: str) -> Took:
        """Publish the next version by one transport. Raises SystemExit when another transport was used."""
        self.version += 1
        with torch.no_grad():
            for _, p in self.policy.trainable():
                p.mul_(1.0001)
        start = time.monotonic()
        dtype: torch.dtype = getattr(torch, self.fleet.dtype)
        compares = dtype if self.world.device.type == "cpu" else None  # digests are those of a CPU
        config = PublishConfig(**VARIANTS[variant])
        parameters = dict(self.policy.trainable())
        writer = VersionWriter(self.world, self.fleet.model, self.policy.names, LoraConfig(), dtype, config, compares)
        made = writer.write(self.folder / f"v{self.version}-s", parameters)
        write_s = time.monotonic() - start
        row = {"run_id": self.run_id, "version": self.version, "parent_version": self.version - 1, "step": self.version}
        facts = {"path": str(made.path), "checksum": made.checksum, "state": VersionState.PENDING, "created_at": 0.0}
        self.database.transact(lambda conn: conn.execute(weight_versions.insert().values(**row, **facts)))
        publisher = Publisher(self.url, "admin-key", lambda _: True, config=config, device=self.world.device)
        offers = Offers(self.world, partial(writer.stream, parameters))
        start = time.monotonic()
        done = publisher.publish(self.version, 0, made, offers)
        seconds = time.monotonic() - start
        *_, event = self.database.query(events.of_run, self.run_id, "publish")
        if not done or set(event.data["transport"].values()) != {config.transport}:
            raise SystemExit(f"{variant}: {event.data}")
        return Took(write_s, seconds, max(event.data["stall_s"].values()), event.data["bytes"])


@contextmanager
def served(folder: Path, fleet: Fleet, world: World) -> Iterator[Run]:
    """Engines, a proxy and a run until the block ends."""
    model, port = fleet.model, free_port()
    engines = [
        launch(
            EngineSpec(
                model=model,
                port=free_port(),
                log_file=folder / f"engine{n}.log",
                dtype=fleet.dtype,
                device=pick_device("auto"),
            )
        )
        for n in range(fleet.count)
    ]
    proxy = start_proxy(folder, [engine.url for engine in engines], port, model)
    try:
        for engine in engines:
            asyncio.run(engine.wait_healthy())
        asyncio.run(_healthy(f"http://127.0.0.1:{port}", proxy))
        database = Database(f"sqlite:///{folder}/bench.db")
        run_id = database.query(runs.by_name, "bench").id
        yield Run(
            f"http://127.0.0.1:{port}", database, run_id, fleet, folder, load_sharded(Policy, model, world.mesh), world
        )
        database.close()
    finally:
        proxy.terminate()
        proxy.wait(STOP_S)
        for engine in engines:
            engine.stop()


async def _healthy(url: str, proxy: Any) -> None:
    async with aiohttp.ClientSession() as http:
        await until_healthy(http, url, proxy)


if __name__ == "__main__":
    main()
