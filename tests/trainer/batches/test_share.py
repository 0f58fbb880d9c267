"""Packs hold all samples within the budget, and what their tensors hold does not depend on how often they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import random_samples

from agentrl.configs.algorithm import Algorithm
from agentrl.domain.batching import build_tree
from agentrl.trainer.batches.advantage_facts import gather_facts
from agentrl.trainer.batches.share import minibatch_packs, packs_of, share_of
from agentrl.trainer.batches.step_times import StepTimes
from agentrl.trainer.distributed import World
from agentrl.trainer.packing import UNPACKED, Sample

GRPO = Algorithm()


def ids(samples: list[Sample]) -> list[str]:
    return sorted(s.tokens.trajectory_id for s in samples)


@pytest.mark.parametrize("budget", [30, 60, 10_000])
def test_packs_hold_every_sample_once_within_the_budget(world: World, budget: int) -> None:
    samples = random_samples()
    (packs,) = packs_of([samples], budget, world)
    assert ids([s for one in packs for s in one.samples]) == ids(samples)
    for one in packs:
        tree = build_tree([s.tokens.input_ids[: s.tokens.computed_tokens] for s in one.samples])
        assert len(one.samples) == 1 or len(tree) <= budget
        assert one.loss_tokens == sum(int(s.tokens.loss_mask.sum()) for s in one.samples)


def test_a_part_without_samples_has_no_packs(world: World) -> None:
    assert packs_of([[], random_samples()[:1]], 100, world)[0] == []


def test_unpacked_models_get_a_pack_for_each_sample(world: World) -> None:
    samples = random_samples()
    (packs,) = packs_of([samples], UNPACKED, world)
    assert [(len(one.samples), one.passes) for one in packs] == [(1, 1)] * len(samples)


def test_a_pack_keeps_its_tree_until_it_is_computed_for_the_last_time(world: World) -> None:
    ((one,),) = packs_of([random_samples()], 10_000, world)
    first = one.microbatch(world.device, last=False)
    kept = one.tree
    assert kept is not None
    one.proximal_S, one.keep_S = torch.ones(one.loss_tokens), torch.ones(one.loss_tokens, dtype=torch.bool)
    again = one.microbatch(world.device)
    assert one.tree is None
    assert torch.equal(first.input_ids_N, again.input_ids_N)
    assert again.proximal_S is one.proximal_S
    assert again.keep_S is one.keep_S


def test_groups_without_advantages_are_in_no_minibatch(world: World) -> None:
    samples = random_samples()
    silent = [s.tokens.group_id == "g1" for s in samples]
    samples = [
        Sample(s.tokens, np.zeros_like(s.advantages) if quiet else s.advantages)
        for s, quiet in zip(samples, silent, strict=True)
    ]
    share = share_of(samples, GRPO, 2, 60, world)
    minibatches, rest = minibatch_packs(share, GRPO, 2, 60, world)
    assert {s.tokens.group_id for one in rest for s in one.samples} == {"g1"}
    assert [{s.tokens.group_id for one in packs for s in one.samples} for packs in minibatches] == [{"g2"}, {"g0"}]
    every = minibatch_packs(share, Algorithm(entropy_coef=0.1), 1, 60, world)
    assert every[1] == []


def test_facts_of_advantages_are_by_trajectory(world: World) -> None:
    samples = random_samples()
    share = share_of(samples, GRPO, 1, 60, world)
    facts = gather_facts(share, len(samples), world)
    for i, s in enumerate(samples):
        trained = s.advantages[s.tokens.loss_mask].astype(np.float64)
        assert facts.means[i] == pytest.approx(trained.mean())
        assert facts.deviations[i] == pytest.approx(((trained - trained.mean()) ** 2).sum())
        assert facts.any[i] == trained.any()


def test_the_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 5.0, 7.0, 10.0, 14.0])
    monkeypatch.setattr("agentrl.trainer.batches.step_times.time.perf_counter", lambda: next(now))
    times = StepTimes(torch.device("cpu"), waited_s=3.0)
    for part in ("read", "forward", "forward"):
        with times.reading(part):
            pass
    times.train_s = 10.0
    assert times.metrics() == {
        "time/wait_for_batch": 3.0,
        "time/read": 1.0,
        "time/build": 0.0,
        "time/forward": 6.0,
        "time/backward": 0.0,
        "time/update": 0.0,
        "time/train": 10.0,
        "time/other": 3.0,
    }
