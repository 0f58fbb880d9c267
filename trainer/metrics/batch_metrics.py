"""Metrics of a step's batch and tokens, as pure functions. docs/metrics.md explains each name.

S: loss tokens of a whole step, over all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from agentrl.domain.experts.routed_experts import RouteOrigin
from agentrl.domain.schemas import PROMPT_VERSION, Batch
from agentrl.domain.session_stats import ROLLOUT, frequent_means
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.trainer.algorithms.bounds import bounded_exp, k3
from agentrl.trainer.packing import Sample

Metrics = dict[str, float]
LABELS_KEPT = 32
"""How many reward names, and how many task sources, get a metric of their own: the most frequent of a batch."""


def finite(metrics: Metrics) -> Metrics:
    """The metrics that are finite. JSON and charts cannot hold NaN and infinity."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def ratio_metrics(log_ratio_S: Tensor) -> Metrics:
    """Metrics of the importance ratios w = π_trained / π_behavior, measured as a token's minibatch begins.

    The effective sample size is (Σw)² / (n Σw²), a share of the n tokens: 1 when all weigh the same.
    """
    if not len(log_ratio_S):
        return {}
    weights_S = bounded_exp(log_ratio_S.double()).numpy()
    return {
        "importance_ratio/mean": float(weights_S.mean()),
        "importance_ratio/max": float(weights_S.max()),
        "importance_ratio/p99": float(np.quantile(weights_S, 0.99)),
        "importance_ratio/ess": float(weights_S.sum() ** 2 / (len(weights_S) * (weights_S**2).sum())),
    }


def mismatch_metrics(gap_S: Tensor) -> Metrics:
    """Metrics of gaps d = log π_trainer − log π_engine, where both computed with the same weights.

    `mismatch_kl` is the mean of e^d − 1 − d: KL(engine ‖ trainer), estimated by k3.
    """
    counted = {"mismatch_tokens": float(len(gap_S))}
    if not len(gap_S):
        return counted
    gap_S = gap_S.double()
    return counted | {
        "logprob_mismatch_mean_abs": float(gap_S.abs().mean()),
        "mismatch_max": float(gap_S.abs().max()),
        "mismatch_kl": float(k3(gap_S).mean()),
    }


def drift_metrics(gap_S: Tensor) -> Metrics:
    """The mean |d| of tokens that older weights sampled: how far the policy has moved since."""
    counted = {"drift_tokens": float(len(gap_S))}
    return counted | {"drift": float(gap_S.double().abs().mean())} if len(gap_S) else counted


def batch_metrics(batch: Batch, samples: Sequence[Sample]) -> Metrics:
    """Metrics that need no model: rewards (one return per episode), advantages, ages, lengths."""
    returns = np.array(list({t.episode_id: t.episode_return for t in batch.trajectories}.values()))
    return {
        "sessions": float(len(returns)),
        "reward/mean": float(returns.mean()),
        "reward/std": float(returns.std()),
        "reward/min": float(returns.min()),
        "reward/max": float(returns.max()),
        **_advantages(samples),
        **_ages(batch),
        **_lengths(batch),
    }


def routing_metrics(batch: Batch) -> Metrics:
    """Shares of the tokens that the update reads by the origin of their experts (RouteOrigin); they sum to 1."""
    counts = np.zeros(len(RouteOrigin), np.int64)
    for t in batch.trajectories:
        if t.loss_mask.any():
            read = int(np.flatnonzero(t.loss_mask)[-1])  # the last loss token is only predicted
            origins = np.zeros(read, np.uint8) if t.routed is None else t.routed.origins[:read]
            counts += np.bincount(origins, minlength=len(RouteOrigin))
    tokens = int(counts.sum())
    shares = {f"routing/{origin.name.lower()}": counts[origin] / max(1, tokens) for origin in RouteOrigin}
    return {"routing/tokens": float(tokens)} | {name: float(share) for name, share in shares.items()}


def _advantages(samples: Sequence[Sample]) -> Metrics:
    """Advantages of loss tokens, and the share of groups without any advantage."""
    of_group: dict[str, list[np.ndarray]] = {}
    for sample in samples:
        if sample.tokens.loss_mask.any():
            of_group.setdefault(sample.tokens.group_id, []).append(sample.advantages[sample.tokens.loss_mask])
    groups = [np.concatenate(parts).astype(np.float64) for parts in of_group.values()]
    if not groups:
        return {}
    everything = np.concatenate(groups)
    return {
        "advantage/mean": float(everything.mean()),
        "advantage/std": float(everything.std()),
        "advantage/zero_groups": float(np.mean([not group.any() for group in groups])),
    }


def _ages(batch: Batch) -> Metrics:
    """Ages of loss tokens in weight versions: mean, maximum, the share of each age, and tokens that were too old."""
    by_version = Counter[int]()
    for t in batch.trajectories:
        by_version.update(t.versions[t.loss_mask].tolist())
    by_age = Counter[int]()
    for version, count in by_version.items():
        by_age[batch.ages[version]] += count
    tokens = max(1, by_age.total())
    mixed = sum(int(t.kv_mixed[t.loss_mask].sum()) for t in batch.trajectories)
    return {
        "off_policy/mean": sum(age * count for age, count in by_age.items()) / tokens,
        "off_policy/max": float(max(by_age, default=0)),
        "off_policy/dropped": float(batch.wasted_tokens),
        **({"off_policy/kv_mixed": mixed / tokens} if mixed else {}),
        **{f"off_policy/age_{age}": count / tokens for age, count in sorted(by_age.items())},
    }


def _lengths(batch: Batch) -> Metrics:
    """Lengths of trajectories: tokens before the first sampled one, sampled tokens, all tokens, calls."""
    sampled = [t.versions != PROMPT_VERSION for t in batch.trajectories]
    measured = {
        "length/prompt": [int(mask.argmax()) if mask.any() else len(mask) for mask in sampled],
        "length/output": [int(mask.sum()) for mask in sampled],
        "length/total": [len(mask) for mask in sampled],
        "length/turns": [len(t.turn_returns) for t in batch.trajectories],
    }
    return {
        f"{name}_{what}": float(measure(lengths))
        for name, lengths in measured.items()
        for what, measure in (("mean", np.mean), ("max", np.max))
    }


def outcome_metrics(batch: Batch, facts: BatchFacts) -> Metrics:
    """Metrics from the store: rewards by name, returns by source, what agents measured, calls that were cut off."""
    by_source: dict[str, dict[str, float]] = {}
    for t in batch.trajectories:
        if source := facts.sources.get(t.group_id):
            by_source.setdefault(source, {})[t.episode_id] = t.episode_return
    returns = {source: list(of_episodes.values()) for source, of_episodes in by_source.items()}
    return {
        **{f"reward/name/{name}": mean for name, mean in frequent_means(facts.rewards, LABELS_KEPT).items()},
        **{f"reward/source/{source}": mean for source, mean in frequent_means(returns, LABELS_KEPT).items()},
        **{f"{ROLLOUT}/{name}": mean for name, mean in frequent_means(facts.stats).items()},
        "truncated_fraction": facts.truncated_calls / max(1, facts.calls),
    }
