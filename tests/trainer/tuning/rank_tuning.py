"""Run by ranks.py: two steps of every method, the trained weights and metrics written by rank 0.

rank_tuning.py MODEL REFERENCE UNPACKED OUT

Pairs are trained with UNPACKED, too, a model whose sequences are not packed. Two ranks make the steps of packed models
again as one context group.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `import support`

from layouts import Layout
from safetensors.torch import save_file
from torch import Tensor
from tuning_setup import KINDS, config_of, prepared, random_items

from agentrl.trainer.distributed import World, full, join_world
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.tuning import step


def main(folder: Path, reference: Path, unpacked: Path, out: Path) -> None:
    packed = [(kind, folder, reference) for kind in KINDS]
    alone = [("dpo", unpacked, unpacked), ("reward-model", unpacked, unpacked)]
    with join_world("cpu", threads=1) as world:
        write(out / f"ranks-{world.size}", [*packed, *alone], world)
        if world.size == 2:
            write(out / "context-2", packed, Layout(context=2).of(world))


def write(out: Path, cases: list[tuple[str, Path, Path]], world: World) -> None:
    metrics: list[dict[str, float]] = []
    weights: dict[str, Tensor] = {}
    for kind, folder, reference in cases:
        config = config_of(kind, lr=1e-4, tokens_per_microbatch=40)
        method, model, items = prepared(config, random_items(kind, 5), folder, world, reference)
        optimizer = make_optimizer(model, config.trainer)
        for _ in range(2):
            metrics.append(step.train(model, optimizer, items, method, 1e-4, config.trainer, world))
        weights |= {f"{kind}/{folder.name}/{name}": full(p).clone() for name, p in model.trainable()}
    if world.leads:
        save_file(weights, out.with_suffix(".safetensors"))
        out.with_suffix(".json").write_text(json.dumps(metrics))


main(*map(Path, sys.argv[1:]))
