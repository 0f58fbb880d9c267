"""What a step says of itself, against numbers that are counted by hand."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support import outline_of, random_trajectory

from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.trainer.batches.advantage_facts import AdvantageFacts
from agentrl.trainer.metrics.batch_metrics import (
    LABELS_KEPT,
    batch_metrics,
    drift_metrics,
    finite,
    mismatch_metrics,
    outcome_metrics,
    ratio_metrics,
)

TWO_TO_ONE = torch.tensor([3.0] * 1 + [1.0] * 3).log()


def trajectory(group: str, name: str, value: float, *, version: int = 1, prompt: int = 4) -> TrajectoryTokens:
    rng = np.random.default_rng(0)
    made = random_trajectory(rng, [1] * prompt, group=group, name=name, turns=2, output=5, version=version)
    object.__setattr__(made, "episode_return", value)
    return made


def batch(*trajectories: TrajectoryTokens, wasted: int = 0) -> BatchOutline:
    outlines = [outline_of(t, wasted_tokens=wasted * (i == 0)) for i, t in enumerate(trajectories)]
    return BatchOutline(step_id="s", step=1, version=1, trajectories=outlines, ages={0: 1, 1: 0})


def facts_of(*advantages: float) -> AdvantageFacts:
    """Of trajectories that have one advantage each."""
    return AdvantageFacts(np.array(advantages, np.float64), np.zeros(len(advantages)), np.array(advantages) != 0)


def test_equal_ratios_give_a_full_effective_sample_size() -> None:
    assert ratio_metrics(torch.zeros(7)) == {
        "importance_ratio/mean": 1.0,
        "importance_ratio/max": 1.0,
        "importance_ratio/p99": 1.0,
        "importance_ratio/ess": 1.0,
    }
    assert ratio_metrics(torch.empty(0)) == {}


def test_one_large_ratio_gives_a_small_effective_sample_size() -> None:
    found = ratio_metrics(TWO_TO_ONE)
    assert found["importance_ratio/mean"] == pytest.approx(1.5)
    assert found["importance_ratio/max"] == pytest.approx(3)
    assert found["importance_ratio/p99"] == pytest.approx(3 - 0.03 * 2)
    assert found["importance_ratio/ess"] == pytest.approx(36 / (4 * 12))


class Rank:
    """One of several threads that pass values to each other, as ranks do."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier

    def everyones(self, value: Any) -> list[Any]:
        self.slots[self.rank] = value
        self.barrier.wait(60)
        found = list(self.slots)
        self.barrier.wait(60)
        return found

    def total(self, values: dict[str, float]) -> dict[str, float]:
        found = self.everyones(values)
        return {name: sum(one[name] for one in found) for name in values}

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.everyones(values))


@pytest.mark.parametrize("measure", [ratio_metrics, mismatch_metrics, drift_metrics])
@pytest.mark.parametrize("sizes", [(500, 1, 0), (0, 0), (3, 250, 40), (1, 0)], ids=str)
def test_ranks_find_the_figures_of_all_tokens(measure: Any, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    parts = [torch.from_numpy(rng.normal(0, 1, size)) for size in sizes]
    slots, barrier = [None] * len(parts), threading.Barrier(len(parts))
    with ThreadPoolExecutor(len(parts)) as ranks:
        calls = [ranks.submit(measure, part, Rank(i, slots, barrier)) for i, part in enumerate(parts)]
        found = [call.result() for call in calls]
    whole = torch.cat(parts)
    assert all(one == pytest.approx(measure(whole), rel=1e-12) for one in found)
    if measure is ratio_metrics and len(whole):
        assert found[0]["importance_ratio/p99"] == pytest.approx(float(np.quantile(np.exp(whole.numpy()), 0.99)))


def test_mismatch_kl_uses_signed_gaps() -> None:
    found = mismatch_metrics(torch.tensor([0.5, -1.0]))
    assert found["mismatch_tokens"] == 2
    assert found["logprob_mismatch_mean_abs"] == 0.75
    assert found["mismatch_max"] == 1
    assert found["mismatch_kl"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1)) / 2)
    assert mismatch_metrics(torch.empty(0)) == {"mismatch_tokens": 0}


def test_drift_is_absent_without_older_tokens() -> None:
    assert drift_metrics(torch.tensor([2.0, -1.0])) == {"drift_tokens": 2, "drift": 1.5}
    assert drift_metrics(torch.empty(0)) == {"drift_tokens": 0}


def test_each_episode_counts_one_return() -> None:
    first, again, other = trajectory("g", "a", 1.0), trajectory("g", "b", 1.0), trajectory("g", "c", 4.0)
    object.__setattr__(again, "episode_id", first.episode_id)
    of = batch(first, again, other)
    found = batch_metrics(of, facts_of(1, 1, -1))
    assert (found["reward/mean"], found["reward/std"], found["sessions"]) == (2.5, 1.5, 2)
    assert (found["reward/min"], found["reward/max"]) == (1, 4)


def test_zero_groups_is_the_share_of_groups_without_advantage() -> None:
    of = batch(*(trajectory(group, name, 0.0) for group in "gh" for name in "ab"))
    found = batch_metrics(of, facts_of(1, -1, 0, 0))
    assert found["advantage/zero_groups"] == 0.5
    assert found["advantage/mean"] == 0
    assert found["advantage/std"] == pytest.approx(math.sqrt(0.5))


def test_ages_are_a_histogram_of_loss_tokens() -> None:
    old, new = trajectory("g", "a", 0.0, version=0), trajectory("g", "b", 1.0)
    new.loss_mask[np.flatnonzero(new.loss_mask)[:5]] = False  # half of them, ten others are left
    of = batch(old, new, wasted=3)
    found = batch_metrics(of, facts_of(1, -1))
    assert found["off_policy/age_0"] == pytest.approx(5 / 15)
    assert found["off_policy/age_1"] == found["off_policy/mean"] == pytest.approx(10 / 15)
    assert (found["off_policy/max"], found["off_policy/dropped"]) == (1, 3)


def test_lengths_are_measured_per_trajectory() -> None:
    of = batch(trajectory("g", "a", 0.0, prompt=4), trajectory("g", "b", 0.0, prompt=8))
    found = batch_metrics(of, facts_of(0, 0))
    assert (found["length/prompt_mean"], found["length/prompt_max"]) == (6, 8)
    assert (found["length/output_mean"], found["length/output_max"]) == (10, 10)
    assert (found["length/total_mean"], found["length/total_max"]) == (6 + 3 + 10, 8 + 3 + 10)
    assert (found["length/turns_mean"], found["length/turns_max"]) == (2, 2)


def test_rewards_are_grouped_by_name_and_returns_by_source() -> None:
    of = batch(trajectory("g", "a", 1.0), trajectory("g", "b", 3.0), trajectory("h", "a", 7.0))
    facts = BatchFacts(rewards={"exact": [0.0, 1.0], "style": [0.5]}, sources={"g": "sums"}, calls=8, truncated_calls=2)
    assert outcome_metrics(of, facts) == {
        "reward/name/exact": 0.5,
        "reward/name/style": 0.5,
        "reward/source/sums": 2.0,
        "truncated_fraction": 0.25,
    }


def test_stats_of_sessions_are_averaged_under_their_names() -> None:
    facts = BatchFacts({}, {}, calls=1, truncated_calls=0, stats={"reward": [1.0, 2.0], "time/reward": [4.0]})
    found = outcome_metrics(batch(trajectory("g", "a", 1.0)), facts)
    assert found == {"rollout/reward": 1.5, "rollout/time/reward": 4.0, "truncated_fraction": 0.0}


def test_only_the_most_frequent_names_are_kept() -> None:
    rare = {f"rare-{i:03}": [1.0] for i in range(LABELS_KEPT + 5)}
    facts = BatchFacts(rewards=rare | {"usual": [1.0, 0.0]}, sources={}, calls=0, truncated_calls=0)
    names = [n for n in outcome_metrics(batch(trajectory("g", "a", 1.0)), facts) if n.startswith("reward/name/")]
    assert len(names) == LABELS_KEPT
    assert "reward/name/usual" in names


def test_metrics_that_are_not_finite_are_left_out() -> None:
    assert finite({"a": math.nan, "b": math.inf, "c": 0.0}) == {"c": 0.0}
