"""Measures publishes by transport and size: their duration, and how long an engine is paused.

    python benchmarks/publish.py --out benchmarks/results/publish.json
    python benchmarks/publish.py --fleets tiny

The engines are real SGLang behind the real proxy, and STREAMS calls run on each of them all the time. The trainer's own
publisher, in this process, publishes one version after another, each with new float32 values for all weights of the
model. First the proxy lets engines read a version during their pause (`publish.prepare: false`, the only way before
there was another): `disk`, `distributed`, `tensor`, in turns. Then engines prepare it: `prepared` reads files with all
tensors, `delta` what has changed. The folder of a version is written before its publish is timed. A FLEET is one
engine of a model (a name, or the path of a folder), one engine with another type (`tiny-bfloat16`), several engines
(`tiny-bfloat16-x2`), or one vLLM, which only reads folders (`tiny-vllm`; `make setup-vllm`). On a machine with one GPU
`distributed` is left out: NCCL joins no two processes of one GPU.

- `publish_s/FLEET/WAY`: from the trainer's request to its answer.
- `stall_ms/FLEET/WAY`: the longest pause of an engine during the publish.
- `stall_steps/FLEET/WAY`: the same in decode steps of that fleet.
- `gap_ms/FLEET/WAY`: the longest time between two tokens of a running call during the publish.
- `written_mib/FLEET/WAY`: bytes that the trainer wrote for the version.
- `write_s/FLEET/WAY`: the time to write the folder and compute its checksum.
- `decode_step_ms/FLEET`: the median time between two tokens of a call, without a publish.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp
import harness
import torch
from fleets.streams import Gaps, streams
from proxied import launch_proxy, start_proxy, until_healthy

from agentrl.configs.publish_config import PublishConfig
from agentrl.configs.trainer_config import LoraConfig
from agentrl.domain.schemas import VersionState
from agentrl.engine.engine_spec import EngineSpec
from agentrl.engine.server_process import free_port, launch, pick_device
from agentrl.models import resolve_model
from agentrl.store import Database, events, runs
from agentrl.store.tables import runs as runs_table
from agentrl.store.tables import weight_versions
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.publish.offers import Offers
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.weights.version_writer import VersionWriter

PAUSED: dict[str, dict[str, Any]] = {
    "disk": {"delta": "never"},
    "distributed": {"delta": "never", "transport": "distributed"},
    "tensor": {"delta": "never", "transport": "tensor"},
}
PREPARED: dict[str, dict[str, Any]] = {"prepared": {"delta": "never"}, "delta": {"delta": "always", "delta_above": 1.0}}
FLEETS = "tiny,smollm2-x2,smollm2-bfloat16-x2"
STREAMS = 8
CALM_S = 10.0
"""Time of calls before the first version."""
STOP_S = 20.0


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 5, "publishes by each way"), fleets=(str, FLEETS, "what to measure")
    )
    report = harness.Report("publish")
    with join_world() as world:
        for name in options.fleets.split(","):
            measure(report, name, options.rounds, world)
    harness.finish(report, options.out)


def measure(report: harness.Report, name: str, rounds: int, world: World) -> None:
    """Measure all ways with one fleet."""
    took: dict[str, list[Took]] = {}
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), Fleet.named(name), world) as run:
        with streams(run.engine_urls, STREAMS, run.folder / "gaps.jsonl"):
            time.sleep(CALM_S)
            took |= by_turns(run, name, ways_here(run.fleet, world), rounds)
            if run.fleet.backend == "sglang":
                run.restart_proxy(prepare=True)
                for way in PREPARED:  # a delta's parent is the version before it
                    took |= by_turns(run, name, {way: PREPARED[way]}, rounds)
        gaps = Gaps.read(run.folder / "gaps.jsonl")
    add(report, Path(name).name, took, gaps)


def ways_here(fleet: Fleet, world: World) -> dict[str, dict[str, Any]]:
    """The ways of PAUSED that the engines and this machine can run."""
    if fleet.backend == "vllm":
        return {"disk": PAUSED["disk"]}
    shared = world.device.type == "cuda" and torch.cuda.device_count() == 1
    return {way: config for way, config in PAUSED.items() if not (shared and way == "distributed")}


def by_turns(run: Run, name: str, ways: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[Took]]:
    """Publish by each way in turn; the first round is a warm-up."""
    took: dict[str, list[Took]] = {way: [] for way in ways}
    writers = {way: run.writer(config) for way, config in ways.items()}
    for round_ in range(-1, rounds):
        for way, writer in writers.items():
            one = run.publish(way, writer)
            print(f"{name:<20} {way:<12} {one.publish_s:7.3f} s, still {one.stall_s:7.3f} s", flush=True)
            if round_ >= 0:
                took[way].append(one)
    return took


def add(report: harness.Report, name: str, took: dict[str, list[Took]], gaps: Gaps) -> None:
    """The figures of one fleet."""
    step_s = gaps.step_s([(each.start, each.end) for of in took.values() for each in of])
    report.add(f"decode_step_ms/{name}", [1000 * step_s], "ms")

    def compare(figure: str, unit: str, value: Callable[[Took], float]) -> None:
        report.compare(
            f"{figure}/{name}", {way: [value(each) for each in of] for way, of in took.items()}, unit, "disk"
        )

    compare("publish_s", "s", lambda each: each.publish_s)
    compare("stall_ms", "ms", lambda each: 1000 * each.stall_s)
    compare("stall_steps", "decode steps", lambda each: each.stall_s / step_s)
    compare("gap_ms", "ms", lambda each: 1000 * max(gaps.during(each.end - each.publish_s, each.end), default=0.0))
    compare("written_mib", "MiB", lambda each: each.n_bytes / 2**20)
    compare("write_s", "s", lambda each: each.write_s)


@dataclass(frozen=True)
class Fleet:
    """Engines of one model."""

    model: Path
    dtype: str = "float32"
    count: int = 1
    backend: Literal["sglang", "vllm"] = "sglang"

    @classmethod
    def named(cls, name: str) -> Fleet:
        """The fleet that has this name in FLEETS."""
        model, *kinds = name.split("-")
        engines = [int(kind[1:]) for kind in kinds if kind.startswith("x")]
        dtypes = [kind for kind in kinds if kind in ("float32", "bfloat16")]
        count = engines[0] if engines else 1
        return cls(resolve_model(model), *dtypes, count=count, backend="vllm" if "vllm" in kinds else "sglang")


@dataclass(frozen=True)
class Took:
    """The durations and the size of one version. `start`: of its writing; `end`: of its publish (monotonic)."""

    start: float
    end: float
    write_s: float
    publish_s: float
    stall_s: float
    n_bytes: int


@dataclass
class Run:
    """A run that versions are published to, as the trainer does."""

    url: str
    fleet: Fleet
    folder: Path
    engine_urls: list[str]
    policy: Policy
    world: World
    proxy: subprocess.Popen[bytes]
    version: int = 0

    def __post_init__(self) -> None:
        self.database = Database(f"sqlite:///{self.folder}/bench.db")
        self.run_id = self.database.query(runs.by_name, "bench").id

    def restart_proxy(self, *, prepare: bool) -> None:
        """Start the proxy again, with or without prepared versions."""
        self.proxy.terminate()
        self.proxy.wait(STOP_S)
        config = self.database.query(runs.get, self.run_id).config
        changed = config | {"publish": {**config["publish"], "prepare": prepare}}
        with self.database.write() as conn:
            conn.execute(runs_table.update().values(config=changed))
        self.proxy = launch_proxy(self.folder, self.engine_urls, int(self.url.rpartition(":")[2]))
        asyncio.run(_healthy(self.url, self.proxy))

    def writer(self, config: dict[str, Any]) -> VersionWriter:
        """What writes the versions of one way."""
        dtype: torch.dtype = getattr(torch, self.fleet.dtype)
        compares = dtype if self.world.device.type == "cpu" else None  # digests are those of a CPU
        settings = PublishConfig(**config)
        return VersionWriter(self.world, self.fleet.model, self.policy.names, LoraConfig(), dtype, settings, compares)

    def publish(self, way: str, writer: VersionWriter) -> Took:
        """Publish the next version in one way. Raises SystemExit when engines got it in another way."""
        self.version += 1
        with torch.no_grad():
            for _, p in self.policy.trainable():
                p.mul_(1.0001)
        config = PublishConfig(**(PAUSED | PREPARED)[way])
        parameters = dict(self.policy.trainable())
        start = time.monotonic()
        made = writer.write(self.folder / f"v{self.version}-{self.run_id}", parameters, lambda: True)
        written = time.monotonic()
        row = {"run_id": self.run_id, "version": self.version, "parent_version": self.version - 1, "step": self.version}
        facts = {"path": str(made.path), "checksum": made.checksum, "state": VersionState.PENDING, "created_at": 0.0}
        self.database.transact(lambda conn: conn.execute(weight_versions.insert().values(**row, **facts)))
        publisher = Publisher(self.url, "admin-key", lambda _: True, config=config, device=self.world.device)
        asked = time.monotonic()
        done = publisher.publish(self.version, 0, made, Offers(self.world, partial(writer.stream, parameters)))
        end = time.monotonic()
        *_, event = self.database.query(events.of_run, self.run_id, "publish")
        expected = "prepared" if way in PREPARED else config.transport
        if not done or set(event.data["transport"].values()) != {expected}:
            raise SystemExit(f"{way}: {event.data}")
        stall_s = max(event.data["stall_s"].values())
        return Took(start, end, written - start, end - asked, stall_s, made.written_bytes)


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
                backend=fleet.backend,
                dtype=fleet.dtype,
                device=pick_device("auto"),
            )
        )
        for n in range(fleet.count)
    ]
    urls = [f"{fleet.backend}+{engine.url}" for engine in engines]
    proxy = start_proxy(folder, urls, port, model, sections={"publish": {"prepare": False}})
    run: Run | None = None
    try:
        for engine in engines:
            asyncio.run(engine.wait_healthy())
        asyncio.run(_healthy(f"http://127.0.0.1:{port}", proxy))
        policy = load_sharded(Policy, model, world.mesh)
        run = Run(f"http://127.0.0.1:{port}", fleet, folder, urls, policy, world, proxy)
        yield run
        run.database.close()
    finally:
        last = proxy if run is None else run.proxy
        last.terminate()
        last.wait(STOP_S)
        for engine in engines:
            engine.stop()


async def _healthy(url: str, proxy: Any) -> None:
    async with aiohttp.ClientSession() as http:
        await until_healthy(http, url, proxy)


if __name__ == "__main__":
    main()
