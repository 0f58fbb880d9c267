"""Run by ranks.py: a teacher's numbers, or its prompt, fail for one trajectory; every rank writes how it ended.

rank_lesson_errors.py MODEL OUT WHAT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support import random_samples

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.domain.schemas import Float32, TrajectoryTokens
from agentrl.errors import AgentRLError, UserError
from agentrl.trainer.distributed import join_world
from agentrl.trainer.models.run_models import make_models
from agentrl.trainer.scoring import make_samples
from agentrl.trainer.teachers.lessons import Lessons

BAD = "g1-t1"


def main(model: Path, out: Path, what: str) -> None:
    def ask(_: str, read: Sequence[TrajectoryTokens]) -> list[Float32]:
        value = np.float32(what) if what != "prompt" else np.float32(-1)
        return [np.full(t.length, value if t.trajectory_id == BAD else -1, np.float32) for t in read]

    def reads(batch: Sequence[TrajectoryTokens]) -> Sequence[TrajectoryTokens]:
        if what == "prompt" and any(t.trajectory_id == BAD for t in batch):
            raise UserError(f"no prompt for {BAD}")
        return batch

    with join_world("cpu", threads=1) as world:
        config = TrainerConfig(algorithm={"distill_coef": 1.0}, teacher="http://t")
        models = make_models(model, config, world)
        batch, ended = [s.tokens for s in random_samples()], "none"
        try:
            make_samples(batch, config.algorithm, models, 64, world, lessons=Lessons("http://t", None, reads, ask))
        except AgentRLError as error:
            ended = f"{type(error).__name__}: {error}"
        (out / f"rank-{world.rank}.txt").write_text(ended)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
