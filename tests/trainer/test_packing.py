"""What is computed once, and what goes where. Packed trees give the numbers of padded rows: test_invariance.py."""

from __future__ import annotations

import numpy as np
from support import random_samples, random_trajectory

from agentrl.trainer.packing import Sample, collate, make_units, plan


def test_a_group_computes_its_shared_prompt_once() -> None:
    rng = np.random.default_rng(0)
    prompt = list(range(3, 53))
    samples = [_sample(random_trajectory(rng, prompt, name=f"t{k}", turns=1, output=5)) for k in range(8)]
    (unit,) = make_units(samples, budget=4096)
    assert unit.size == 50 + 8 * 4  # the last token of a completion is predicted, never read


def test_equal_completions_share_their_predictions() -> None:
    rng = np.random.default_rng(0)
    samples = [_sample(random_trajectory(rng, [3, 4], name=f"t{k}", turns=1, outputs=[[9, 8, 7]])) for k in range(4)]
    batch = collate(make_units(samples, budget=100))
    assert len(batch.predictions_S) == 12
    assert len(batch.targets_P) == 3


def test_ranks_get_equally_many_microbatches_and_empty_ones_train_nothing() -> None:
    units = make_units(random_samples(groups=3), budget=30)
    (by_rank,) = plan(units, ranks=4, minibatches=1, budget=30)
    assert len({len(r) for r in by_rank}) == 1
    placed = [id(u) for r in by_rank for m in r for u in m]
    assert sorted(placed) == sorted(id(u) for u in units)
    assert len(collate([]).advantages_S) == 0


def test_minibatches_keep_groups_whole() -> None:
    planned = plan(make_units(random_samples(groups=4), budget=30), ranks=1, minibatches=2, budget=30)
    groups = [{u.group_id for rank in mb for units in rank for u in units} for mb in planned]
    assert len(groups) == 2
    assert not groups[0] & groups[1]


def _sample(trajectory: object) -> Sample:
    return Sample(trajectory, np.zeros(len(trajectory.input_ids), np.float32))
