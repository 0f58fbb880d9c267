"""Measures how long a weight version takes to write, and the memory of every rank, at several numbers of ranks.

    python benchmarks/sharded_publish.py --out benchmarks/results/sharded_publish.json
    python benchmarks/sharded_publish.py --before ../agentrl-0ffccf8     (a worktree of that commit)

Each case starts its ranks, which load the model sharded by FSDP on the CPU, and write one version after another: the
first with all tensors, then one after an update of 1e-6 to each weight, as deltas where the type has 16 bits. Cases
take turns. `before` gathers the model to rank 0, which hashes and writes it; it runs the code of the given folder.

- `whole_s/CASE`, `delta_s/CASE`: from the first rank's call to the last one's return.
- `peak_mib/CASE`: the largest growth of a rank's resident memory while it writes; `peak_rank0_mib/CASE`: of rank 0.
- `share_mib/CASE`: a rank's share of the parameters, which it holds in any case.
- `delta_bytes/CASE`, `density/CASE`: of the last delta.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
ROUNDS, RANKS = 3, "1,2,4"


def main() -> None:
    """Measure, print a table, write JSON."""
    import harness

    from agentrl.models import resolve_model

    options = harness.arguments(
        __doc__,
        rounds=(int, ROUNDS, "versions of each kind"),
        ranks=(str, RANKS, "numbers of ranks"),
        model=(str, "smollm2", "the model"),
        dtypes=(str, "bfloat16,float32", "the engines' types"),
        before=(str, "", "a folder with the code to compare with"),
    )
    report = harness.Report("sharded_publish")
    model = resolve_model(options.model)
    for dtype in options.dtypes.split(","):
        for ranks in map(int, options.ranks.split(",")):
            ways = {"sharded": Path(__file__).parents[1]} | ({"before": Path(options.before)} if options.before else {})
            for way, code in ways.items():
                add(report, f"{dtype}/{ranks}/{way}", run(way, code, model, dtype, ranks, options.rounds))
    harness.finish(report, options.out)


def add(report: Any, case: str, found: dict[str, Any]) -> None:
    """Add the figures of a case."""
    for name, unit in (("whole_s", "s"), ("delta_s", "s"), ("peak_mib", "MiB"), ("peak_rank0_mib", "MiB")):
        if found[name]:
            report.add(f"{name}/{case}", found[name], unit, statistic=max if unit == "MiB" else median)
    for name, unit in (("share_mib", "MiB"), ("delta_bytes", "bytes"), ("density", "")):
        if found[name] is not None:
            report.add(f"{name}/{case}", [found[name]], unit)
    print(case, {name: found[name] for name in ("whole_s", "delta_s", "peak_mib", "delta_bytes")}, flush=True)


def median(samples: list[float]) -> float:
    """The middle one."""
    return sorted(samples)[len(samples) // 2]


def run(way: str, code: Path, model: Path, dtype: str, ranks: int, rounds: int) -> dict[str, Any]:
    """Start the ranks of a case and return what rank 0 writes."""
    with socket.socket() as s, tempfile.TemporaryDirectory() as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        ours = (
            dict(os.environ) | meet | {"LOCAL_WORLD_SIZE": str(ranks), "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
        )
        command = [sys.executable, __file__, "--rank", way, str(model), dtype, str(rounds), folder]
        started = [
            subprocess.Popen(command, env=ours | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
        ]
        statuses = [process.wait() for process in started]
        if any(statuses):
            raise SystemExit(f"{way}: a rank has failed: {statuses}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def rank(way: str, model: Path, dtype: str, rounds: int, folder: Path) -> None:
    """What a rank does."""
    import torch

    from agentrl.trainer.distributed import join_world
    from agentrl.trainer.models.policy import Policy
    from agentrl.trainer.models.sharding import load_sharded

    with join_world("cpu", threads=1) as world:
        policy = load_sharded(Policy, model, world.mesh)
        write = (before if way == "before" else sharded)(policy, model, getattr(torch, dtype), world)
        whole, delta, peaks, last = [], [], [], None
        for number in range(2 * rounds):
            is_delta = bool(number % 2)
            move(policy)
            world.barrier()
            held = settled_memory()
            start = time.monotonic()
            last = write(folder / f"v{number + 1}-s", is_delta)
            world.barrier()
            (delta if is_delta and last else whole).append(time.monotonic() - start)
            peaks.append(world.everyones((peak_memory() - held) / MIB))
        share = sum(local(p).nbytes for _, p in policy.trainable()) / MIB
        if world.leads:
            found = {
                "whole_s": whole,
                "delta_s": delta,
                "peak_mib": [max(of_ranks) for of_ranks in peaks],
                "peak_rank0_mib": [of_ranks[0] for of_ranks in peaks],
                "share_mib": share,
                "delta_bytes": last[0] if last else None,
                "density": last[1] if last else None,
            }
            (folder / "found.json").write_text(json.dumps(found))


Write = Callable[[Path, bool], "tuple[int, float] | None"]
"""Writes a version; returns bytes and density of a delta."""


def sharded(policy: Any, model: Path, dtype: Any, world: Any) -> Write:
    """Every rank writes its own share."""
    from agentrl.configs.publish_config import PublishConfig
    from agentrl.configs.trainer_config import LoraConfig
    from agentrl.trainer.weights.version_writer import VersionWriter

    bits = "always" if dtype.itemsize == 2 else "never"
    config = PublishConfig(delta=bits, bucket_bytes=16 * MIB, delta_above=1.0)
    writer = VersionWriter(world, model, policy.names, LoraConfig(), dtype, config)

    def write(folder: Path, is_delta: bool) -> tuple[int, float] | None:
        writer.config = config.model_copy(update={} if is_delta else {"delta": "never"})
        if not is_delta and bits == "always":  # all tensors, and the shares for the next version's delta
            writer.config = config.model_copy(update={"anchor_every": 1})
            writer._parent = None
        made = writer.write(folder, dict(policy.trainable()), lambda: True)
        return (made.written_bytes, made.density) if is_delta and not made.whole else None

    return write


def before(policy: Any, model: Path, dtype: Any, world: Any) -> Write:
    """Rank 0 gathers the model and writes it."""
    from agentrl.configs.trainer_config import LoraConfig
    from agentrl.trainer.publish import weights

    def write(folder: Path, _: bool) -> tuple[int, float] | None:
        trained = weights.trainable(policy, world)
        world.only_leader(lambda: weights.publishable(folder, trained, model, policy.names, LoraConfig(), dtype))
        return None

    return write


def move(policy: Any) -> None:
    """An update of 1e-6 to every weight, up or down."""
    import torch

    with torch.no_grad():
        for _, p in policy.trainable():
            part = local(p)
            part += 1e-6 * torch.randint(0, 2, part.shape).mul_(2).sub_(1)


def local(parameter: Any) -> Any:
    """This rank's part of a parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def settled_memory() -> int:
    """Give freed memory back, begin a new peak; returns the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_memory() -> int:
    """The most resident bytes since `settled_memory`."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _, _, way, model, dtype, rounds, folder = sys.argv
        rank(way, Path(model), dtype, int(rounds), Path(folder))
    else:
        main()
