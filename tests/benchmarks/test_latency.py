"""The environment of benchmarks/asynchrony.py: its tool's times, and that only what is compared differs."""

from __future__ import annotations

import math
from statistics import fmean, median, stdev

from latency.agent import SlowToolAgent
from latency.run import GROUP_SIZE, MEDIAN_S, SIGMA, Variant, config

from agentrl.configs.run_config import RunConfig


def times(seed: int) -> list[float]:
    agent = SlowToolAgent(seed, MEDIAN_S, SIGMA)
    return [agent._latency_s(f"task {n}") for n in range(500) for _ in range(GROUP_SIZE)]


def test_the_latencies_of_the_tool_are_fixed_by_their_seed() -> None:
    found = times(0)
    assert found == times(0)
    assert found != times(1)
    assert len(set(found)) == len(found)
    assert abs(median(found) - MEDIAN_S) < 0.15
    logs = [math.log(seconds) for seconds in found]
    assert abs(fmean(logs) - math.log(MEDIAN_S)) < 0.1
    assert abs(stdev(logs) - SIGMA) < 0.1


def test_variants_differ_in_staleness_and_correction_alone() -> None:
    whole = {v: RunConfig(**config(v, 0, 30, 3e-4)) for v in (Variant(0), Variant(4), Variant(4, corrected=False))}
    synchronous, stale, uncorrected = whole.values()
    assert (synchronous.trainer.max_staleness, stale.trainer.max_staleness) == (0, 4)
    assert stale.trainer.algorithm.correction != "none"
    assert uncorrected.trainer.algorithm == stale.trainer.algorithm.model_copy(update={"correction": "none"})
    for other in (stale, uncorrected):
        trainer = other.trainer.model_copy(update={"max_staleness": 0, "algorithm": synchronous.trainer.algorithm})
        rollout = other.rollout.model_copy(update={"max_concurrent_groups": synchronous.rollout.max_concurrent_groups})
        assert other.model_copy(update={"trainer": trainer, "rollout": rollout}) == synchronous
        assert other.rollout.max_concurrent_groups == 5 * synchronous.rollout.max_concurrent_groups
