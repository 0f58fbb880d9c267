"""Steps with several teachers, however many ranks carry them out. With arguments: run by ranks.py.

taught_steps.py MODEL TEACHER SERVER OUT TENSOR

Rank 0 writes the metrics and the gradients of each case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from support import AGES, VOCABULARY, random_samples
from torch import Tensor

from agentrl.configs.episodes.task_sources import TaskSource
from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.distributed import World, full, join_world
from agentrl.trainer.models import run_models
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.teachers.lessons import Lessons
from agentrl.trainer.teachers.teacher_prompts import after
from agentrl.trainer.teachers.teacher_servers import TeacherServers
from agentrl.trainer.update import update_policy

SOURCES = {"g0": "sums", "g1": "words", "g2": "riddles", "g3": "sums"}
CASES = ("sampled", "full")


def trajectories() -> list[TrajectoryTokens]:
    """Four groups, all at temperature 1, which servers need."""
    from dataclasses import replace

    found = [s.tokens for s in random_samples(groups=4)]
    return [replace(t, temperatures=np.ones_like(t.temperatures)) for t in found]


def reads(batch: Any) -> list[TrajectoryTokens | None]:
    """A hint for each group but one trajectory."""
    found: list[TrajectoryTokens | None] = []
    for one in batch:
        hint = np.random.default_rng(int(one.group_id[1])).integers(3, VOCABULARY, 11).astype(np.int32)
        found.append(None if one.trajectory_id == "g1-t2" else after(hint, one))
    return found


def step(
    case: str, model: Path, teacher: Path, server: str, world: World
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One step: its metrics, and its whole gradients. `sums` learn from a server or a model, `words` from the policy
    itself.
    """
    by_source = {"sums": server if case == "sampled" else str(teacher), "words": "policy"}
    algorithm = {"distill_coef": 0.5, "distill": case, "reward_weight": 0.5}
    config = RunConfig(
        name="r",
        model=str(model),
        agent="a:B",
        tasks=[TaskSource(path=f"{name}.jsonl", name=name) for name in ("sums", "words", "riddles")],
        trainer={
            "algorithm": algorithm,
            "teacher": by_source,
            "teacher_prompt": "hint",
            "tokens_per_microbatch": 48,
            "grad_clip": 1e9,
            "minibatches": 2,
        },
    )
    with (
        patch.object(run_models, "resolve_model", Path),  # the folders have no tokenizers
        patch.object(run_models, "check_same_tokens", lambda *_: None),
    ):
        models = make_models(model, config.trainer, world)
    servers = TeacherServers([server], config, model, world, Lineage()) if case == "sampled" else None
    lessons = Lessons(by_source, SOURCES, reads, None if servers is None else servers.logprobs)
    settings, minibatches = config.trainer, config.trainer.minibatches
    share = make_samples(
        trajectories(), settings.algorithm, models, 48, world, minibatches=minibatches, lessons=lessons
    )
    optimizer, gradients = torch.optim.SGD([p for _, p in models.policy.trainable()], lr=0.0), dict[str, Tensor]()

    def keep(*_: object) -> None:
        for name, p in models.policy.trainable():
            assert p.grad is not None
            before = gradients.get(name)
            now = full(p.grad).clone()
            gradients[name] = now if before is None else before + now

    optimizer.register_step_pre_hook(keep)
    metrics = update_policy(models.policy, optimizer, share, 1, AGES, settings, world, teachers=models.teachers)
    return metrics, gradients


def main(model: Path, teacher: Path, server: str, out: Path, tensor: int) -> None:
    with join_world("cpu", threads=1, tensor_parallel=tensor) as world:
        for case in CASES:
            metrics, gradients = step(case, model, teacher, server, world)
            if world.leads:
                (out / f"{case}.json").write_text(json.dumps(metrics))
                save_file(gradients, out / f"{case}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), int(sys.argv[5]))
