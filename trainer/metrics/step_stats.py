"""What the forward passes of a step find out about loss tokens, and the metrics that follow.

S: loss tokens so far, on this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.batch_metrics import Metrics, drift_metrics, mismatch_metrics, ratio_metrics
from agentrl.trainer.nonfinite import Seen
from agentrl.trainer.packing import Microbatch

PER_TOKEN = (
    "clip_fraction",
    "behavior_weight",
    "behavior_weight_capped",
    "approx_kl",
    "entropy",
    "masked_fraction",
    "kl_reference",
    "value_loss",
)
"""Metrics that are means over the loss tokens of all minibatches; the last two where there is such a model."""
SUMMED = (*PER_TOKEN, "loss", "tokens", "tokens_computed")
"""What every rank adds up."""


@dataclass(slots=True)
class Tally:
    """Of one minibatch, or of a step."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    log_ratios: list[Tensor] = field(default_factory=list)  # (S,) log π/π_behaviour, π as a token's update begins
    gaps: list[Tensor] = field(default_factory=list)  # the same of π before the step, where π itself sampled
    drifts: list[Tensor] = field(default_factory=list)  # and where older weights did, or had a part in it
    seen: list[Seen] = field(default_factory=list)  # by microbatch

    def compare(self, before_S: Tensor, m: Microbatch, version: int) -> None:
        """Note logprobs of the policy before the step, which is `version`."""
        gap_S = (before_S - m.behavior_S).detach()
        current_S = (m.versions_S == version) & ~m.kv_mixed_S
        self.gaps.append(gap_S[current_S].cpu())
        self.drifts.append(gap_S[~current_S].cpu())

    def add(self, other: Tally) -> None:
        """Count what `other` has, whose figures are finite."""
        for name, value in other.sums.items():
            self.sums[name] += value
        self.log_ratios += other.log_ratios
        self.gaps += other.gaps
        self.drifts += other.drifts

    def metrics(self, minibatches: int, algorithm: Algorithm, world: World) -> Metrics:
        """Of all ranks and so many minibatches. Collective."""
        sums = world.total({name: self.sums[name] for name in SUMMED})
        absent = {"kl_reference": not algorithm.needs_reference, "value_loss": not algorithm.needs_critic}
        return {
            **{name: sums[name] / max(1.0, sums["tokens"]) for name in PER_TOKEN if not absent.get(name)},
            "loss": sums["loss"] / max(1, minibatches),
            "tokens_trained": sums["tokens"],
            "tokens_computed": sums["tokens_computed"],
            **ratio_metrics(_everyones(self.log_ratios, world)),
            **mismatch_metrics(_everyones(self.gaps, world)),
            **drift_metrics(_everyones(self.drifts, world)),
        }


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / max(1, len(values))


def _everyones(parts: Sequence[Tensor], world: World) -> Tensor:
    return world.gather(torch.cat([torch.empty(0), *parts]))
