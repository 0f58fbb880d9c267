"""One rank, from the lease to its first forward pass: `python first_forward.py URL CONFIG`, under RANK and WORLD_SIZE.

Runs with the package of this commit, and with that of commits before ranks read their own shares. Rank 0 writes the
measurements of all ranks as JSON. The model is none: the pass is not made.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agentrl.configs.run_config import RunConfig
from agentrl.store import Database
from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.stored_lineage import StoredLineage
from agentrl.trainer.update import plan_update

try:
    from agentrl.domain.batches.outline_message import pack, unpack
    from agentrl.trainer.batches.leased_batch import LeasedBatch
    from agentrl.trainer.scoring import make_share
    from agentrl.trainer.stored_lineage import reading_lineage
except ImportError:  # an earlier commit
    from agentrl.trainer.scoring import make_samples

    BY_SHARES = False
else:
    BY_SHARES = True

MODELS: Any = SimpleNamespace(policy=SimpleNamespace(budget=lambda budget: budget), critic=None, reference=None)


def main(url: str, config: RunConfig) -> None:
    """Measure once."""
    with join_world("cpu", threads=1) as world:
        database = Database(url)
        if world.leads:
            lineage: Lineage = StoredLineage.begin(database, config)
            lineage.reconcile(None)
        else:
            lineage = reading_lineage(database, config) if BY_SHARES else Lineage()
        world.barrier()
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        start, marks = time.perf_counter(), {}
        (by_shares if BY_SHARES else by_rank_0)(lineage, config, world, marks)
        took = {"seconds": time.perf_counter() - start, "peak": resident_bytes("VmHWM"), "before": before}
        found = world.everyones(took | {"parts": marks})
        database.close()
        if world.leads:
            print(json.dumps(found), flush=True)


def by_shares(lineage: Lineage, config: RunConfig, world: World, marks: dict[str, float]) -> None:
    """This commit: outlines to all ranks, tokens by the rank that trains them."""
    start = time.perf_counter()
    found = lineage.wait_for_batch(1, 600.0, threading.Event().wait)
    raw = world.share_bytes(pack(found) if found is not None else None) if world.size > 1 else b""
    outline = found if found is not None else unpack(raw)
    marks["lease"] = time.perf_counter() - start
    batch = LeasedBatch(outline, lineage.reader)  # type: ignore[arg-type]
    trainer = config.trainer
    share = make_share(
        batch.outlines, batch.read, trainer.algorithm, MODELS, trainer.token_budget, trainer.minibatches, world
    )
    marks["read"] = time.perf_counter() - start - sum(marks.values())
    plan = plan_update(share, trainer.token_budget, trainer, world)
    plan.minibatches[0][0].microbatch(world.device)
    marks["build"] = time.perf_counter() - start - sum(marks.values())


def by_rank_0(lineage: Lineage, config: RunConfig, world: World, marks: dict[str, float]) -> None:
    """Earlier commits: rank 0 reads the whole batch and sends it to all ranks, which build all trees."""
    start = time.perf_counter()
    batch: Any = lineage.wait_for_batch(1, 600.0, threading.Event().wait)
    marks["lease"] = time.perf_counter() - start
    batch, _ = world.share((batch, False))
    marks["read"] = time.perf_counter() - start - sum(marks.values())
    trainer = config.trainer
    samples = make_samples(batch.trajectories, trainer.algorithm, MODELS, trainer.token_budget, world)
    plan_update(samples, trainer.token_budget, trainer, world)
    marks["build"] = time.perf_counter() - start - sum(marks.values())


def resident_bytes(name: str) -> int:
    """A figure of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], RunConfig.model_validate_json(Path(sys.argv[2]).read_text()))
