"""Tokens that are chosen by figures of a whole minibatch: against loops, and however the minibatch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support import random_samples
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.covariance import drawn, largest, random_keys
from agentrl.trainer.batches.share import Pack, packs_of
from agentrl.trainer.batches.token_choice import Scored, choose_tokens, counted
from agentrl.trainer.distributed import World
from agentrl.trainer.packing import Sample

VERSION = 3


def logprobs_of(sample: Sample) -> Tensor:
    """The same for a sample in every pack."""
    rng = np.random.default_rng([*sample.tokens.trajectory_id.encode()])
    return torch.from_numpy(rng.normal(-2, 1.5, int(sample.tokens.loss_mask.sum())).astype(np.float32))


def scored(packs: Sequence[Pack], world: World, moved: float = 0.3) -> list[Scored]:
    found = []
    for pack in packs:
        m = pack.microbatch(world.device)
        logprobs = torch.cat([torch.empty(0), *map(logprobs_of, pack.samples)])
        found.append(Scored.of(pack, m, logprobs, logprobs - moved * torch.sin(7 * logprobs)))
    return found


def by_trajectory(packs: Sequence[Pack], name: str) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for pack in packs:
        masks = torch.split(getattr(pack, name), [int(s.tokens.loss_mask.sum()) for s in pack.samples])
        found |= {s.tokens.trajectory_id: mask.tolist() for s, mask in zip(pack.samples, masks, strict=True)}
    return found


def flat(parts: list[Scored], name: str) -> Tensor:
    return torch.cat([getattr(one, name) for one in parts])


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"clip_cov": 0.1, "clip_cov_low": 0.1}, "keep_S"),
        ({"kl_cov": 0.1}, "far_S"),
        ({"m2_threshold": 0.5}, "keep_S"),
        ({"correction": "reject", "masked_in_mean": "none", "correction_cap": 1.1}, "counts_S"),
    ],
    ids=str,
)
def test_the_choice_does_not_depend_on_how_a_minibatch_is_cut(parts: dict[str, Any], field: str, world: World) -> None:
    algorithm, found = Algorithm(**parts), []
    for budget, samples in ((10_000, random_samples()), (40, random_samples()[::-1])):
        (packs,) = packs_of([samples], budget, world)
        choose_tokens(scored(packs, world), algorithm, VERSION, world)
        found.append(by_trajectory(packs, field))
        assert len({value for values in found[-1].values() for value in values}) == 2
    assert found[0] == found[1]


def test_clip_cov_draws_its_share_from_tokens_between_the_bounds_that_no_bound_changed(world: World) -> None:
    algorithm = Algorithm(clip_cov=0.1, clip_cov_low=0.2, clip_cov_high=3.0)
    (packs,) = packs_of([random_samples()], 60, world)
    parts = scored(packs, world)
    choose_tokens(parts, algorithm, VERSION, world)
    logprobs, advantages = flat(parts, "logprobs_S").double(), flat(parts, "advantages_S").double()
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    ratio = torch.exp(logprobs - flat(parts, "proximal_S").double())
    bound = -advantages * ratio.clamp(0.8, 1.2) > -advantages * ratio + 1e-9
    chosen = ~torch.cat([pack.keep_S for pack in packs if pack.keep_S is not None])
    assert chosen.sum() == max(1, int(0.1 * len(logprobs)))
    assert ((covariance > 0.2) & (covariance < 3.0) & ~bound)[chosen].all()
    assert bound.any()


def test_another_step_draws_other_tokens(world: World) -> None:
    found = []
    for version in (VERSION, VERSION + 1):
        (packs,) = packs_of([random_samples()], 10_000, world)
        choose_tokens(scored(packs, world), Algorithm(clip_cov=0.05, clip_cov_low=0.1), version, world)
        found.append(by_trajectory(packs, "keep_S"))
    assert found[0] != found[1]


def test_kl_cov_takes_the_tokens_of_the_largest_covariance(world: World) -> None:
    (packs,) = packs_of([random_samples()], 60, world)
    parts = scored(packs, world)
    choose_tokens(parts, Algorithm(kl_cov=0.1, clip="none"), VERSION, world)
    logprobs, advantages = flat(parts, "logprobs_S").double(), flat(parts, "advantages_S").double()
    covariance = (logprobs - logprobs.mean()) * (advantages - advantages.mean())
    far = torch.cat([pack.far_S for pack in packs if pack.far_S is not None])
    assert far.sum() == int(0.1 * len(logprobs))
    assert covariance[far].min() > covariance[~far].max()
    assert all(pack.keep_S is None for pack in packs)


def test_weights_are_divided_by_their_mean(world: World) -> None:
    (packs,) = packs_of([random_samples()], 60, world)
    parts = scored(packs, world)
    mean = choose_tokens(parts, Algorithm(correction_normalize=True, correction_cap=2.0), VERSION, world)
    weights = torch.exp(flat(parts, "proximal_S") - flat(parts, "behavior_S")).clamp(max=2.0)
    assert mean == pytest.approx(float(weights.double().mean()), rel=1e-6)


def test_a_trajectory_without_a_token_that_counts_is_not_counted(world: World) -> None:
    (packs,) = packs_of([random_samples()], 10_000, world)
    (pack,) = packs
    everything = counted(packs, Algorithm(), world)
    assert (everything.tokens, everything.sequences) == (pack.loss_tokens, len(pack.samples))
    first = int(pack.samples[0].tokens.loss_mask.sum())
    pack.counts_S = torch.arange(pack.loss_tokens) >= first
    left = counted(packs, Algorithm(), world)
    assert (left.tokens, left.sequences) == (pack.loss_tokens - first, len(pack.samples) - 1)
    whole = counted(packs, Algorithm(correction="reject", masked_in_mean="trajectories"), world)
    assert (whole.tokens, whole.sequences) == (pack.loss_tokens - first, len(pack.samples))


def test_a_minibatch_without_tokens_has_no_choice_to_make(world: World) -> None:
    nothing = Pack([], 0)
    algorithm = Algorithm(clip_cov=0.1, kl_cov=0.1, m2_threshold=0.1, correction_normalize=True, correction_cap=2.0)
    assert choose_tokens(scored([nothing], world), algorithm, VERSION, world) == 1.0
    assert largest(torch.empty(0), 0.5) == float("inf")
    assert drawn(torch.zeros(3) > 0, torch.rand(3), 0.5) == -1.0


def test_random_keys_are_those_of_the_trajectory_and_the_step() -> None:
    keys = random_keys("t1", 10_000, 5)
    np.testing.assert_array_equal(keys, random_keys("t1", 10_000, 5))
    assert not np.array_equal(keys, random_keys("t1", 10_000, 6))
    assert not np.array_equal(keys, random_keys("t2", 10_000, 5))
    assert abs(keys.mean() - 0.5) < 0.02
