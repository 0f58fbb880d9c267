"""Metrics of a step's batch and tokens, as pure functions. docs/metrics.md explains each name.

S: loss tokens of a whole step, over all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from agentrl.domain.batches.outline import BatchOutline, Outline
from agentrl.domain.experts.routed_experts import RouteOrigin
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.domain.session_stats import ROLLOUT, frequent_means
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.trainer.algorithms.bounds import bounded_exp, k3
from agentrl.trainer.batches.advantage_facts import AdvantageFacts

Metrics = dict[str, float]
LABELS_KEPT = 32
"""How many reward names, and how many task sources, get a metric of their own: the most frequent of a batch."""


def finite(metrics: Metrics) -> Metrics:
    """The metrics that are finite. JSON and charts cannot hold NaN and infinity."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class Peers(Protocol):
    """The ranks that have the rest of the tokens (`World`)."""

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks, by name."""

    def gather(self, values: Tensor) -> Tensor:
        """Every rank's 1-D tensor, one after another."""


class Alone:
    """The peers of a process that has all tokens."""

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """The values."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The tensor."""
        return values


ALONE = Alone()


def ratio_metrics(log_ratio_S: Tensor, peers: Peers = ALONE) -> Metrics:
    """Metrics of the importance ratios w = π_trained / π_behavior, measured as a token's minibatch begins, over the
    tokens of all ranks. Collective if `peers` are.

    The effective sample size is (Σw)² / (n Σw²), a share of the n tokens: 1 when all weigh the same. For the quantile,
    ranks exchange the largest ratios only.
    """
    weights_S = bounded_exp(log_ratio_S.double())
    sums = peers.total(
        {"n": float(len(weights_S)), "w": float(weights_S.sum()), "w2": float((weights_S * weights_S).sum())}
    )
    n = int(sums["n"])
    if not n:
        return {}
    at = QUANTILE * (n - 1)
    largest = peers.gather(weights_S.topk(min(len(weights_S), n - int(at))).values).sort(descending=True).values
    low, high = largest[n - 1 - int(at)], largest[max(0, n - 2 - int(at))]
    return {
        "importance_ratio/mean": sums["w"] / n,
        "importance_ratio/max": float(largest[0]),
        "importance_ratio/p99": float(low + (high - low) * (at - int(at))),
        "importance_ratio/ess": sums["w"] ** 2 / (n * sums["w2"]),
    }


QUANTILE = 0.99


def mismatch_metrics(gap_S: Tensor, peers: Peers = ALONE) -> Metrics:
    """Metrics of gaps d = log π_trainer − log π_engine, where both computed with the same weights. Collective if
    `peers` are.

    `mismatch_kl` is the mean of e^d − 1 − d: KL(engine ‖ trainer), estimated by k3.
    """
    gap_S = gap_S.double()
    sums = peers.total({"n": float(len(gap_S)), "abs": float(gap_S.abs().sum()), "kl": float(k3(gap_S).sum())})
    largest = peers.gather(gap_S.abs().amax(keepdim=True) if len(gap_S) else gap_S)
    counted = {"mismatch_tokens": sums["n"]}
    if not sums["n"]:
        return counted
    return counted | {
        "logprob_mismatch_mean_abs": sums["abs"] / sums["n"],
        "mismatch_max": float(largest.max()),
        "mismatch_kl": sums["kl"] / sums["n"],
    }


def drift_metrics(gap_S: Tensor, peers: Peers = ALONE) -> Metrics:
    """The mean |d| of tokens that older weights sampled: how far the policy has moved since.
    Collective if `peers` are.
    """
    sums = peers.total({"n": float(len(gap_S)), "abs": float(gap_S.double().abs().sum())})
    return {"drift_tokens": sums["n"]} | ({"drift": sums["abs"] / sums["n"]} if sums["n"] else {})


def batch_metrics(batch: BatchOutline, advantages: AdvantageFacts) -> Metrics:
    """Metrics that need no model: rewards (one return per episode), advantages, ages, lengths. Rewards and lengths are
    those of trajectories that are trained for the first time: replays are selected by their reward.
    """
    returns = np.array(list({t.episode_id: t.episode_return for t in batch.fresh}.values()))
    return {
        "sessions": float(len(returns)),
        "reward/mean": float(returns.mean()),
        "reward/std": float(returns.std()),
        "reward/min": float(returns.min()),
        "reward/max": float(returns.max()),
        **_greedy(batch),
        "truncated_episodes": len({t.episode_id for t in batch.fresh if t.truncated}) / len(returns),
        **_advantages(batch, advantages),
        **_ages(batch),
        **_lengths(batch.fresh),
        **({"replayed_groups": float(len(batch.replayed))} if batch.replayed else {}),
    }


def _greedy(batch: BatchOutline) -> Metrics:
    """The mean return of the groups' greedy episodes, if there are any."""
    found = {t.group_id: t.greedy_return for t in batch.fresh if t.greedy_return is not None}
    return {"reward/greedy": sum(found.values()) / len(found)} if found else {}


def routing_metrics(counts: Mapping[RouteOrigin, float]) -> Metrics:
    """Shares of the tokens that the update reads by the origin of their experts; they sum to 1."""
    tokens = sum(counts.values())
    shares = {f"routing/{origin.name.lower()}": n / max(1.0, tokens) for origin, n in counts.items()}
    return {"routing/tokens": tokens} | shares


def origins_read(trajectories: Iterable[TrajectoryTokens]) -> dict[str, float]:
    """How many tokens that the update reads have experts of each origin, by its name."""
    counts = np.zeros(len(RouteOrigin), np.int64)
    for t in trajectories:
        read = t.computed_tokens
        origins = np.zeros(read, np.uint8) if t.routed is None else t.routed.origins[:read]
        counts += np.bincount(origins, minlength=len(RouteOrigin))
    return {origin.name: float(counts[origin]) for origin in RouteOrigin}


def _advantages(batch: BatchOutline, facts: AdvantageFacts) -> Metrics:
    """Advantages of loss tokens, and the share of groups without any advantage."""
    tokens = np.array([t.loss_tokens for t in batch.trajectories], np.float64)
    groups: dict[str, bool] = {}
    for t, has_any in zip(batch.trajectories, facts.any.tolist(), strict=True):
        if len(t.trained):
            groups[t.group_id] = groups.get(t.group_id, False) or has_any
    if not groups:
        return {}
    mean = float(tokens @ facts.means / tokens.sum())
    variance = float((facts.deviations.sum() + tokens @ (facts.means - mean) ** 2) / tokens.sum())
    return {
        "advantage/mean": mean,
        "advantage/std": math.sqrt(variance) if variance >= 0 else variance,
        "advantage/zero_groups": float(np.mean([not taught for taught in groups.values()])),
    }


def _ages(batch: BatchOutline) -> Metrics:
    """Ages of loss tokens in weight versions: mean, maximum, the share of each age, and tokens that were too old."""
    by_age = Counter[int]()
    mixed = 0
    for t in batch.trajectories:
        for call, version, start, end in t.trained.tolist():
            by_age[batch.ages[version]] += end - start
            mixed += (end - start) * bool(t.kv_mixed[call])
    tokens = max(1, by_age.total())
    return {
        "off_policy/mean": sum(age * count for age, count in by_age.items()) / tokens,
        "off_policy/max": float(max(by_age, default=0)),
        "off_policy/dropped": float(batch.wasted_tokens),
        **({"off_policy/kv_mixed": mixed / tokens} if mixed else {}),
        **{f"off_policy/age_{age}": count / tokens for age, count in sorted(by_age.items())},
    }


def _lengths(trajectories: Sequence[Outline]) -> Metrics:
    """Lengths of trajectories: tokens before the first sampled one, sampled tokens, all tokens, calls."""
    measured = {
        "length/prompt": [int(t.sampled[0, 2]) if len(t.sampled) else t.length for t in trajectories],
        "length/output": [t.sampled_tokens for t in trajectories],
        "length/total": [t.length for t in trajectories],
        "length/turns": [len(t.calls) for t in trajectories],
    }
    return {
        f"{name}_{what}": float(measure(lengths))
        for name, lengths in measured.items()
        for what, measure in (("mean", np.mean), ("max", np.max))
    }


def outcome_metrics(batch: BatchOutline, facts: BatchFacts) -> Metrics:
    """Metrics from the store: rewards by name, as recorded, and their running statistics, where they are normalised;
    returns by source, what agents measured, calls that were cut off.
    """
    by_source: dict[str, dict[str, float]] = {}
    for t in batch.fresh:
        if source := facts.sources.get(t.group_id):
            by_source.setdefault(source, {})[t.episode_id] = t.episode_return
    returns = {source: list(of_episodes.values()) for source, of_episodes in by_source.items()}
    scaled = sorted(facts.moments, key=lambda name: (-facts.moments[name].n, name))[:LABELS_KEPT]
    return {
        **{f"reward/name/{name}": mean for name, mean in frequent_means(facts.rewards, LABELS_KEPT).items()},
        **{f"reward/source/{source}": mean for source, mean in frequent_means(returns, LABELS_KEPT).items()},
        **{f"reward/running_mean/{name}": facts.moments[name].mean for name in scaled},
        **{f"reward/running_std/{name}": facts.moments[name].deviation for name in scaled},
        **{f"{ROLLOUT}/{name}": mean for name, mean in frequent_means(facts.stats).items()},
        "truncated_fraction": facts.truncated_calls / max(1, facts.calls),
    }
