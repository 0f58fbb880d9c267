"""The steps of a generated run: what each trained of its groups, its metrics, and its weight version."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from agentrl.domain.schemas import FACTS, MASKED_FACTS, Json
from agentrl.store.db import codec

from .episode_texts import SOURCES
from .run_timeline import EPOCH, MAX_STALENESS, PUBLISHED, TRAINED, Timeline
from .session_rows import Path

FACTS_EVERY = 50
"""Steps whose trajectories have facts of their tokens: every so many, and the last ones."""
FACTS_LAST = 10
OF_TRAIN = {"read": 0.01, "build": 0.02, "forward": 0.33, "backward": 0.56, "update": 0.05, "other": 0.03}
"""Shares of an update's time."""


@dataclass(slots=True)
class StepTotals:
    """The totals of a step's batch."""

    id: str
    number: int
    groups: int = 0
    trajectories: int = 0
    tokens: int = 0
    wasted: int = 0
    oldest: int | None = None
    ages: dict[int, int] = field(default_factory=dict)
    returns: dict[str, float] = field(default_factory=dict)  # by session

    def lease(self, paths: Iterable[Path], trained: bool) -> list[Json]:
        """Lease a group's ready trajectories; returns the rows of those that the step trained."""
        self.groups += 1
        found = []
        for path in paths:
            row = path.row
            if row["state"] != "ready":
                continue
            row |= {"lease_epoch": EPOCH, "lease_step_id": self.id}
            self.returns[row["session_id"]] = row["return"]
            ages: dict[int, int] = {}
            for version, start, end in (span for spans, _ in path.trained for span in spans):
                age = max(0, self.number - 1 - version)
                ages[age] = ages.get(age, 0) + end - start
            young = {age: tokens for age, tokens in ages.items() if age <= MAX_STALENESS}
            tokens = sum(young.values())
            self.wasted += sum(ages.values()) - tokens
            if not tokens:
                row |= {"state": "stale", "reason": "too_old"}
                continue
            self.trajectories += 1
            row["state"] = "trained" if trained else "leased"
            if not trained:
                continue
            self.tokens += tokens
            self.oldest = max(self.oldest or 0, *young)
            for age, n in young.items():
                self.ages[age] = self.ages.get(age, 0) + n
            found.append(
                {
                    "step_id": self.id,
                    "trajectory_id": row["id"],
                    "advantage": row["return"] - 0.5,
                    "staleness_max": max(young),
                    "staleness_mean": sum(age * n for age, n in young.items()) / tokens,
                    "tokens_trained": tokens,
                }
            )
        return found

    def row(self, run_id: str, timeline: Timeline, rng: random.Random) -> Json:
        """The row of `steps`."""
        done = self.number <= timeline.steps
        mean = sum(self.returns.values()) / max(1, len(self.returns))
        return {
            "id": self.id,
            "run_id": run_id,
            "epoch": EPOCH,
            "step": self.number,
            "state": "published" if done else "started",
            "version_before": self.number - 1,
            "version_after": self.number if done else None,
            "max_staleness": MAX_STALENESS,
            "turn_discount": 1.0,
            "reward_scaling": None,
            "estimator": "grpo" if done else None,
            "batch_digest": f"{rng.getrandbits(128):032x}" if done else None,
            "groups": self.groups,
            "trajectories": self.trajectories,
            "tokens_trained": self.tokens if done else 0,
            "wasted_tokens": self.wasted if done else 0,
            "staleness_max": self.oldest if done else None,
            "return_mean": mean if done else None,
            "metrics": codec.json_text(_metrics(self, timeline, mean, rng) if done else {}),
            "started_at": timeline.at(self.number),
            "trained_at": timeline.at(self.number + TRAINED) if done else None,
            "published_at": timeline.at(self.number + PUBLISHED) if done else None,
        }


def version_row(run_id: str, number: int, timeline: Timeline, rng: random.Random) -> Json:
    """The row of the weight version that a step made; version 0 is the base weights."""
    base = number == 0
    return {
        "run_id": run_id,
        "version": number,
        "parent_version": None if base else number - 1,
        "step": number,
        "path": None if base else f"runs/generated/versions/{number}",
        "checksum": None if base else f"{rng.getrandbits(256):064x}",
        "state": "published",
        "created_at": timeline.start if base else timeline.at(number + TRAINED),
        "published_at": timeline.start if base else timeline.at(number + PUBLISHED),
    }


def facts_row(trained: Json, rng: np.random.Generator) -> Json:
    """The facts of the tokens of a trained trajectory."""
    tokens = trained["tokens_trained"]
    table = np.abs(rng.normal(0.5, 0.2, (len(FACTS), tokens))).astype(np.float32)
    return {
        "step_id": trained["step_id"],
        "trajectory_id": trained["trajectory_id"],
        "tokens": tokens,
        "facts": len(table),
        "data": codec.pack_tables(table, np.zeros((len(MASKED_FACTS), 0), np.float32)),
    }


def _metrics(of: StepTotals, timeline: Timeline, mean: float, rng: random.Random) -> Json:
    """The metrics that the trainer writes, by the names of docs/metrics.md."""
    done = of.number / (timeline.steps + 1)
    tokens = max(1, of.tokens)
    noise = lambda size: rng.gauss(0.0, size)  # noqa: E731
    train_s = 0.5 * timeline.step_s * math.exp(noise(0.1))
    turns = of.tokens / max(1, of.trajectories) / 13
    values = list(of.returns.values())
    lengths = {"prompt": 36.0, "output": 13 * turns, "total": 36 + 20 * turns, "turns": turns}
    return {
        "reward/mean": mean,
        "reward/std": float(np.std(values)),
        "reward/min": min(values, default=0.0),
        "reward/max": max(values, default=0.0),
        "reward/name/reward": mean - 0.03,
        "reward/name/format": 0.1,
        **{f"reward/source/{name}": min(1.1, max(0.0, mean + noise(0.08))) for name in SOURCES},
        "rollout/turns": turns,
        "rollout/tool_errors": 1 + noise(0.1),
        "sessions": float(len(values)),
        "advantage/mean": noise(0.02),
        "advantage/std": 0.9 + noise(0.05),
        "advantage/zero_groups": max(0.0, 0.2 * done + noise(0.03)),
        "off_policy/mean": sum(age * n for age, n in of.ages.items()) / tokens,
        "off_policy/max": float(max(of.ages, default=0)),
        "off_policy/dropped": float(of.wasted),
        **{f"off_policy/age_{age}": n / tokens for age, n in sorted(of.ages.items())},
        "logprob_mismatch_mean_abs": 0.004 * math.exp(noise(0.2)),
        "mismatch_max": 0.3 * math.exp(noise(0.3)),
        "mismatch_kl": 2e-5 * math.exp(noise(0.4)),
        "mismatch_tokens": float(of.ages.get(0, 0)),
        "drift": 0.01 * math.exp(noise(0.2)),
        "drift_tokens": float(tokens - of.ages.get(0, 0)),
        "importance_ratio/mean": 1 + noise(0.002),
        "importance_ratio/max": 1.8 + abs(noise(0.5)),
        "importance_ratio/p99": 1.1 + abs(noise(0.02)),
        "importance_ratio/ess": 0.99 - abs(noise(0.01)),
        "behavior_weight": 1 + noise(0.002),
        "behavior_weight_capped": abs(noise(0.001)),
        "clip_fraction": abs(noise(0.01)),
        "masked_fraction": 0.0,
        "approx_kl": 1e-3 * math.exp(noise(0.3)),
        "entropy": 1.2 * math.exp(-1.5 * done) + 0.2 + noise(0.02),
        "loss": noise(0.02),
        "grad_norm": 0.6 * math.exp(noise(0.25)),
        "lr": 1e-5 * (1 - 0.9 * done),
        "nonfinite_minibatches": 0.0,
        **{f"length/{name}_mean": value for name, value in lengths.items()},
        **{f"length/{name}_max": 2.2 * value for name, value in lengths.items()},
        "truncated_fraction": 0.04 + abs(noise(0.01)),
        "tokens_trained": float(of.tokens),
        "tokens_computed": 1.4 * of.tokens,
        "packed": 1.0,
        "tokens_per_s": of.tokens / train_s,
        "flops": 3.2e15 * tokens / 1e4,
        "time/wait_for_batch": abs(noise(0.1)) * timeline.step_s,
        "time/wait_for_policy": 1.5 + abs(noise(0.3)),
        "time/train": train_s,
        **{f"time/{name}": share * train_s for name, share in OF_TRAIN.items()},
        "time/checkpoint": 2.0 + abs(noise(0.3)),
        "time/write_version": 1.5 + abs(noise(0.2)),
        "checkpointed": 1.0,
    }
