"""Run by ranks.py: steps of test_invariance.py on several ranks. Rank 0 writes what each computed.

rank_invariance.py MODEL REFERENCE OUT REPLICAS CHECKPOINT…

first-ALGORITHM   the first step, for each algorithm of plain.py
CASE              the second step, for each checkpoint `…/CASE/step-…` of one rank
saved, third      a checkpoint of these ranks, and the step that they make after it, for the last case
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from long_tailed import long_tailed, paid
from safetensors.torch import save_file
from steps import ALGORITHMS, CASES, NO_CLIP, Computed, Run

from agentrl.trainer.checkpoints import checkpoint_folders
from agentrl.trainer.distributed import World, join_world

BUDGET = 300  # tokens: each rank has several microbatches


def write(folder: Path, found: Computed, world: World) -> None:
    if world.leads:
        folder.mkdir()
        for name, tensors in zip(Computed._fields[1:], found[1:], strict=True):
            save_file(tensors, folder / f"{name}.safetensors")
        (folder / "metrics.json").write_text(json.dumps(found.metrics))


def main(model: Path, reference: Path, out: Path, replicas: int, checkpoints: list[Path]) -> None:
    first, second = (long_tailed(model, seed) for seed in (0, 1))
    with join_world("cpu", threads=1, replicas=replicas) as world:
        carried_out = {"tokens_per_microbatch": BUDGET, "keep_gathered": world.size > replicas > 1}
        for name, algorithm in ALGORITHMS.items():
            run = Run(model, world, algorithm=algorithm, grad_clip=NO_CLIP, **carried_out)
            write(out / f"first-{name}", run.update(paid(first)), world)
        for folder in checkpoints:
            case = folder.parent.name
            run = Run(model, world, reference, **CASES[case], **carried_out)
            run.restore(checkpoint_folders.read(folder))
            write(out / case, run.step(second), world)
        run.save(out / "saved")
        write(out / "third", run.step(first), world)


main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), [Path(p) for p in sys.argv[5:]])
