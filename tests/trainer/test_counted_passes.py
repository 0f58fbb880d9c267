"""The metric `flops` counts all passes of a step: those that score, and those of reference and critic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import Run
from support import random_samples, save_tiny_model
from torch.utils.flop_counter import FlopCounterMode

from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.flops import PassCounts
from agentrl.trainer.metrics.model_shape import shape_of
from agentrl.trainer.models import onednn

ATEN = torch.ops.aten


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"minibatches": 2},
        {"algorithm": {"preset": "ppo", "kl_coef": 0.1}},
        {"algorithm": {"preset": "rloo", "kl_coef": 0.1}},
    ],
    ids=["grpo", "recomputed", "critic-reference", "kl-in-reward"],
)
def test_flops_are_those_that_torch_counts(
    settings: dict[str, Any], tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "PREFERRED", False)  # torch does not know the operations of its products
    pairs: dict[str, float] = {"forward": 0.0, "backward": 0.0, "predictions": 0.0}
    add = PassCounts.add

    def adding(self: PassCounts, tokens: float, predictions: float, more: float, *, trains: bool) -> None:
        pairs["forward"] += more
        pairs["backward"] += more * trains
        pairs["predictions"] += predictions * trains
        add(self, tokens, predictions, more, trains=trains)

    monkeypatch.setattr(PassCounts, "add", adding)
    run = Run(save_tiny_model(tmp_path), world, **settings)
    batch = [
        replace(s.tokens, turn_returns=np.full(2, i % 3.0), episode_return=i % 3.0)
        for i, s in enumerate(random_samples())
    ]
    run.step(batch)  # takes all of its own counts
    pairs |= dict.fromkeys(pairs, 0.0)
    with FlopCounterMode(display=False) as counter:
        found = run.step(batch).metrics["flops"]
    counts = counter.get_flop_counts()["Global"]
    shape = shape_of(run.models.policy.lm.config.to_dict())
    assert shape is not None
    inside = 2 * shape.pair * len(shape.blocks) * (pairs["forward"] + 2 * pairs["backward"])
    products = sum(counts.get(op, 0) for op in (ATEN.mm, ATEN.addmm))
    products += 2 * shape.head * pairs["predictions"]  # the head's gradient: torch does not count `addmm_`
    assert found - inside == pytest.approx(products, rel=1e-3)  # the critic's head is not counted
