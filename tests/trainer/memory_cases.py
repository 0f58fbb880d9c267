"""Models and settings whose planned memory is compared with measured memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import save_tiny_model

from agentrl.configs.trainer_config import TrainerConfig
from agentrl.trainer.planning.workload import Workload

WORK = Workload(tokens=192, prompt=64, group_size=4, groups=2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step."""

    ranks: int
    sizes: dict[str, Any]  # of the model
    settings: dict[str, Any] = field(default_factory=dict)  # of the trainer
    work: Workload = WORK
    budget: int = 512
    passes: int = 2

    @property
    def vocabulary(self) -> int:
        return int(self.sizes["vocab_size"])

    @property
    def config(self) -> TrainerConfig:
        return TrainerConfig(tokens_per_microbatch=self.budget, **self.settings)

    def folder(self, root: Path) -> Path:
        """The model's folder, made on first use."""
        target = root / "-".join(f"{key}={value}" for key, value in self.sizes.items())
        if not target.exists():
            save_tiny_model(target, **self.sizes)
        return target


WIDE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
DEEP = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "tied": False}
CASES = {
    "one rank": Case(ranks=1, sizes=WIDE),
    "one rank, deep": Case(ranks=1, sizes=DEEP),
    "one rank, checkpointing": Case(ranks=1, sizes=WIDE, settings={"activation_checkpointing": True}),
    "one rank, adapter": Case(ranks=1, sizes=WIDE, settings={"lora": {"rank": 8}}),
    "one rank, top layers": Case(ranks=1, sizes=WIDE, settings={"train_layers": 2}),
    "two ranks": Case(ranks=2, sizes=WIDE),
    "two ranks, deep": Case(ranks=2, sizes=DEEP),
    "two ranks, checkpointing": Case(ranks=2, sizes=DEEP, settings={"activation_checkpointing": True}),
    "two ranks, adapter": Case(ranks=2, sizes=WIDE, settings={"lora": {"rank": 8}}),
    "two ranks, gathered": Case(ranks=2, sizes=DEEP, settings={"keep_gathered": True}),
}
