"""Packed prefix trees give the numbers of the plain, one-sequence-at-a-time computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support import random_samples, random_trajectory, save_tiny_model
from transformers import AutoModelForCausalLM

from agentrl.trainer.distributed import World
from agentrl.trainer.model import load_policy
from agentrl.trainer.packing import Sample, collate, make_units, plan


def plain_logprobs(lm: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """(S,) logprobs of the sample's loss tokens, from a forward over the whole unpadded sequence."""
    ids = torch.from_numpy(sample.tokens.input_ids.astype(np.int64))
    where = torch.from_numpy(np.flatnonzero(sample.tokens.loss_mask))
    logits = lm(input_ids=ids[None]).logits[0]
    temperature = torch.from_numpy(sample.tokens.temperatures)[where]
    return torch.log_softmax(logits[where - 1] / temperature[:, None], -1)[range(len(where)), ids[where]]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [30, 64, 4096])
def test_packed_logprobs_and_gradients_equal_plain_ones(tmp_path: Path, world: World, tied: bool, budget: int) -> None:
    folder = save_tiny_model(tmp_path, tied=tied)
    samples = random_samples()
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = {s.tokens.trajectory_id: plain_logprobs(lm, s) for s in samples}
    weights = torch.from_numpy(np.concatenate([s.advantages[s.tokens.loss_mask] for s in samples]))
    (torch.cat([*plain.values()]) * weights).sum().backward()

    policy = load_policy(folder, world.mesh)
    (minibatch,) = plan(make_units(samples, budget), ranks=1, minibatches=1, budget=budget)
    for rows in minibatch[0]:
        batch = collate(rows)
        logprobs, _ = policy(batch)
        (logprobs[batch.predictions_S] * batch.advantages_S).sum().backward()
        expected = torch.cat([plain[s.tokens.trajectory_id] for row in rows for u in row for s in u.samples])
        torch.testing.assert_close(logprobs[batch.predictions_S], expected, rtol=1e-5, atol=1e-5)

    gradients = {name: p.grad.full_tensor() for name, p in policy.trainable()}
    for name, parameter in lm.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(gradients[name] / scale, parameter.grad / scale, rtol=1e-5, atol=1e-5)


def test_a_group_computes_its_shared_prompt_once() -> None:
    rng = np.random.default_rng(0)
    prompt = list(range(3, 53))
    samples = [_sample(random_trajectory(rng, prompt, name=f"t{k}", turns=1, output=5)) for k in range(8)]
    (unit,) = make_units(samples, budget=4096)
    assert len(unit.tree) == 50 + 8 * 4  # the last token of a completion is predicted, never read


def test_equal_completions_share_their_predictions() -> None:
    rng = np.random.default_rng(0)
    samples = [_sample(random_trajectory(rng, [3, 4], name=f"t{k}", turns=1, outputs=[[9, 8, 7]])) for k in range(4)]
    batch = collate([make_units(samples, budget=100)])
    assert len(batch.predictions_S) == 12
    assert len(batch.targets_P) == 3


def test_ranks_get_equally_many_microbatches_and_empty_ones_train_nothing() -> None:
    units = make_units(random_samples(groups=3), budget=30)
    (by_rank,) = plan(units, ranks=4, minibatches=1, budget=30)
    assert len({len(r) for r in by_rank}) == 1
    placed = [id(u) for r in by_rank for m in r for row in m for u in row]
    assert sorted(placed) == sorted(id(u) for u in units)
    assert len(collate([]).advantages_S) == 0


def test_minibatches_keep_groups_whole() -> None:
    planned = plan(make_units(random_samples(groups=4), budget=30), ranks=1, minibatches=2, budget=30)
    groups = [
        {u.samples[0].tokens.group_id for rank in mb for grid in rank for row in grid for u in row} for mb in planned
    ]
    assert len(groups) == 2
    assert not groups[0] & groups[1]


def _sample(trajectory: object) -> Sample:
    return Sample(trajectory, np.zeros(len(trajectory.input_ids), np.float32))
