"""Run by ranks.py: measures the memory of a step on the CPU rank 0 writes the peaks as JSON.

rank_memory.py OUT CASE…
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from live_bytes import LiveBytes
from memory_cases import CASES, Case

from agentrl.trainer.distributed import World, join_world
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.optimizer import make_optimizer
from agentrl.trainer.planning.step_trace import make_moments
from agentrl.trainer.planning.workload import filling_samples
from agentrl.trainer.update import update_policy


def measured(case: Case, folder: Path, world: World) -> int:
    """Bytes of the peak of one update, moments included."""
    torch.manual_seed(0)
    models = make_models(folder, case.config, world)
    optimizer = make_optimizer(models.policy, case.config)
    make_moments(models.policy, optimizer)
    budget = models.policy.budget(case.config.tokens_per_microbatch)
    samples = filling_samples(case.work, budget, case.passes * world.data_size, case.vocabulary)
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    with LiveBytes([*models.policy.parameters(), *models.policy.buffers(), *moments]) as live:
        update_policy(models.policy, optimizer, samples, 0, {0: 0}, case.config, world)
    return int(live.peak)


def main(out: Path, names: list[str]) -> None:
    with join_world("cpu", threads=1) as world:
        found = {name: measured(CASES[name], CASES[name].folder(out), world) for name in names}
        if world.leads:
            (out / "measured.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
