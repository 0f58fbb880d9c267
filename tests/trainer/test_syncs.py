"""No microbatch waits for the device: in forward and backward passes no number is read from a tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import Run
from support import random_samples, save_tiny_model
from syncs import watched

from agentrl.trainer import update
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.step_stats import StepStats


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("syncs"))


def test_waits_are_found() -> None:
    x = torch.arange(4.0)
    with watched() as found:
        x[0].item(), x[1].tolist(), bool(x[0] > 1), float(x[1]), x.cpu()
        x[x > 1], x.nonzero(), x + 1, x[torch.tensor([1, 2])]
    assert [what.split(" ")[0] for what in found if not what.startswith("aten._local")] == [
        "item",
        "tolist",
        "__bool__",
        "__float__",
        "cpu",
        "aten.index.Tensor",
        "aten.nonzero.default",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"algorithm": {"preset": "ppo", "kl_coef": 0.1}},
        {"algorithm": {"proximal": "interpolate", "correction_level": "turn"}, "minibatches": 2},
        {"algorithm": {"preset": "gspo", "entropy_coef": 0.01}, "activation_checkpointing": True},
        {"lora": {"rank": 2}},
    ],
    ids=["grpo", "ppo-kl", "interpolated", "gspo", "adapter"],
)
def test_no_microbatch_waits_for_the_device(
    model: Path, world: World, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    microbatches: list[int] = []
    accumulate = update._accumulate_gradients

    def watching(this: Any, batches: Any, *args: Any) -> tuple[StepStats, float | None]:
        with watched() as found:
            stats = accumulate(this, batches, *args)
        waits.extend(found)
        microbatches.append(len(batches))
        return stats

    monkeypatch.setattr(update, "_accumulate_gradients", watching)
    run = Run(model, world, tokens_per_microbatch=40, **settings)
    run.step(
        [
            replace(s.tokens, turn_returns=np.full(2, i % 3.0), episode_return=i % 3.0)
            for i, s in enumerate(random_samples())
        ]
    )
    assert sum(microbatches) > 3
    assert waits == []
