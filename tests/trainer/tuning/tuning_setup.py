"""What the tests of tuning share: random items over the small model, and one step of every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support import VOCABULARY

from agentrl.configs.config_files import validated
from agentrl.configs.tuning_config import AnyConfig, DpoConfig, RewardModelConfig, SftConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Body
from agentrl.trainer.tuning import step
from agentrl.trainer.tuning.items import Item, make_sample, pair
from agentrl.trainer.tuning.methods import Dpo, Method, method_of

KINDS = {"sft": SftConfig, "dpo": DpoConfig, "ipo": DpoConfig, "reward-model": RewardModelConfig}


def config_of(kind: str, folder: Path = Path("runs"), **trainer: Any) -> AnyConfig:
    """A configuration of a kind; the data that it names are not read."""
    data = {"name": "test", "model": "tiny", "runs_dir": folder, "data": {"file": "none.jsonl"}, "trainer": trainer}
    return validated(data | ({"loss_type": "ipo"} if kind == "ipo" else {}), KINDS[kind])


def random_items(kind: str, count: int = 6, seed: int = 0) -> list[Item]:
    """Conversations of two turns, or pairs of answers of different lengths."""
    rng = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return rng.integers(3, VOCABULARY, int(rng.integers(low, high))).tolist()

    items: list[Item] = []
    for i in range(count):
        prompt = some(4, 9)
        if kind == "sft":
            parts = [prompt, some(1, 6), some(1, 4), some(1, 6)]
            mask = [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
            items.append([make_sample([t for part in parts for t in part], mask, group=str(i), name=str(i))])
        else:
            answers = [some(1, 8), some(1, 8)]
            sides = [
                make_sample(prompt + a, [False] * len(prompt) + [True] * len(a), group=str(i), name=f"{i}.{k}")
                for k, a in enumerate(answers)
            ]
            items.append(pair(sides[0], sides[1], str(i)))
    return items


def prepared(
    config: AnyConfig, items: list[Item], folder: Path, world: World, reference: Path | None = None
) -> tuple[Method, Body, list[Item]]:
    """The method, its model, and its items as they are packed; `reference`: another model than `folder`'s."""
    method = method_of(config)
    items = [method.prepared(item) for item in items]
    if isinstance(method, Dpo):
        base = method.load(reference or folder, config, world)
        items = step.with_reference(base, items, method, config.trainer, world)
    return method, method.load(folder, config, world), items
