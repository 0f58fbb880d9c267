"""Sums and per-token figures that a step's forward passes measure, and the metrics computed from them.

They stay on the device, so that no microbatch waits for it, until `settle` fetches those of a minibatch at once.
S: loss tokens so far, on this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.configs.algorithm import Algorithm
from agentrl.trainer.algorithms.user_functions import PREFIX
from agentrl.trainer.distributed import World
from agentrl.trainer.experts.load_balancing import load_metrics
from agentrl.trainer.metrics.batch_metrics import Metrics, drift_metrics, mismatch_metrics, ratio_metrics
from agentrl.trainer.metrics.engine_gaps import CallGaps
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
)
"""Metrics that are means over the loss tokens of all minibatches; the last two need other models."""
OF_OUR_LOSS = (
    "clip_fraction",
    "behavior_weight",
    "behavior_weight_capped",
    "masked_fraction",
    "kl_reference",
)
"""Those that a loss function of the user does not compute."""
SUMMED = (
    *PER_TOKEN,
    "value_loss",
    "values",
    "loss",
    "tokens",
    "tokens_computed",
    "kl_teacher",
    "tokens_taught",
)
"""The figures that are summed over ranks."""


class _Compared(NamedTuple):
    """The gaps of a microbatch's tokens, which of them are no drifts, and whose tokens they are."""

    gap_S: Tensor
    current_S: Tensor
    turns_S: Tensor
    trajectory_ids: tuple[str, ...]
    first_turns: tuple[int, ...]


@dataclass(slots=True)
class StepStats:
    """The figures of one minibatch, or of a whole step, on this rank."""

    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # settled
    log_ratios: list[Tensor] = field(default_factory=list)  # log π/π_behavior, π as the token's minibatch begins
    gaps: list[Tensor] = field(default_factory=list)  # the same, π before the step, at tokens that π sampled
    drifts: list[Tensor] = field(default_factory=list)  # the same at tokens with older weights or older keys
    seen: list[Seen] = field(default_factory=list)  # by microbatch
    loads_RE: Tensor | None = None  # tokens that each of a mixture's routers sent to each expert
    _waiting: dict[str, Tensor] = field(default_factory=dict)  # 0-dim float64 sums on the device
    call_gaps: CallGaps = field(default_factory=CallGaps)  # sums of the gaps
    _compared: list[_Compared] = field(default_factory=list)

    def add_microbatch(self, m: Microbatch, sums: Mapping[str, Tensor], seen: Seen) -> None:
        """Add the policy's pass over a microbatch."""
        for name, value in sums.items():
            self._sum(name, value)
        self.sums["tokens"] += len(m.advantages_S)
        self.sums["tokens_computed"] += len(m.input_ids_N)
        self.log_ratios.append(seen.tokens.logprobs_S - m.behavior_S)
        self.seen.append(seen)

    def add_routing(self, loads_RE: Tensor, disagreements: int) -> None:
        """Add a microbatch: loads of experts, and how many tokens have other experts in another trajectory."""
        self.loads_RE = loads_RE if self.loads_RE is None else self.loads_RE + loads_RE
        self.sums["routing/disagreements"] += disagreements

    def add_balance(self, loss: Tensor) -> None:
        """Add a microbatch's load-balancing loss times its loss tokens."""
        self._sum("router_aux_loss", loss.double())

    def routing_metrics(self, world: World, *, balances: bool) -> Metrics:
        """Metrics of a mixture's routing, with `balances` of its load-balancing loss too. Collective."""
        sums = world.total({name: self.sums[name] for name in ("tokens", "routing/disagreements")})
        own = (self.sums["router_aux_loss"], None if self.loads_RE is None else self.loads_RE.cpu())
        everyones = world.everyones(own)[:: world.mesh.tensor_size]  # context ranks have different tokens
        found = {"routing/disagreements": sums["routing/disagreements"]}
        if balances:
            found["router_aux_loss"] = sum(balance for balance, _ in everyones) / max(1.0, sums["tokens"])
        loads = [loads_RE for _, loads_RE in everyones if loads_RE is not None]
        return found | (load_metrics(torch.stack(loads).sum(0)) if loads else {})

    def add_value_losses(self, losses_S: Tensor, of_S: Tensor) -> None:
        """Add the critic's pass over the microbatch that was added last; `of_S` is true for the tokens with a value."""
        self.seen[-1].value_losses_S = losses_S
        self._sum("value_loss", losses_S.double().sum())
        self._sum("values", of_S.double().sum())

    def compare(self, before_S: Tensor, m: Microbatch, version: int) -> None:
        """Add the gaps between engine and trainer; `before_S` is log π of the policy before the step, `version`."""
        gap_S = (before_S - m.behavior_S).detach()
        current_S = (m.versions_S == version) & ~m.kv_mixed_S
        self._compared.append(_Compared(gap_S, current_S, m.turns_S, m.trajectory_ids, m.first_turns))

    def _sum(self, name: str, value: Tensor) -> None:
        before = self._waiting.get(name)
        self._waiting[name] = value if before is None else before + value

    def settle(self) -> None:
        """Fetch what the passes since the last call have left on the device."""
        if self._waiting:
            for name, value in zip(self._waiting, torch.stack([*self._waiting.values()]).tolist(), strict=True):
                self.sums[name] += value
        self._waiting = {}
        self.log_ratios = [log_ratio_S.cpu() for log_ratio_S in self.log_ratios]
        for one in self._compared:
            gap_S, current_S = one.gap_S.cpu(), one.current_S.cpu()
            self.gaps.append(gap_S[current_S])
            self.drifts.append(gap_S[~current_S])
            self.call_gaps.add(gap_S[current_S], one.turns_S.cpu()[current_S], one.trajectory_ids, one.first_turns)
        self._compared = []

    def add(self, other: StepStats) -> None:
        """Add a settled minibatch whose figures are finite. `seen` is not added: it only locates what is not finite."""
        for name, value in other.sums.items():
            self.sums[name] += value
        self.log_ratios += other.log_ratios
        self.gaps += other.gaps
        self.drifts += other.drifts
        self.call_gaps.merge(other.call_gaps)
        if other.loads_RE is not None:
            self.loads_RE = other.loads_RE if self.loads_RE is None else self.loads_RE + other.loads_RE

    def metrics(self, minibatches: int, algorithm: Algorithm, world: World, *, own_loss: bool = False) -> Metrics:
        """The metrics of a step with this number of `minibatches`, over all ranks. `own_loss` says that a function of
        the user computed the loss. Collective.
        """
        named = self._names_of_own_metrics(world) if own_loss else []
        sums = world.total({name: self.sums[name] for name in (*SUMMED, *named)})
        absent = {
            "kl_reference": not algorithm.needs_reference,
        }
        absent |= dict.fromkeys(OF_OUR_LOSS, True) if own_loss else {}
        taught = {}
        if algorithm.distill_coef and not own_loss:
            taught["kl_teacher"] = sums["kl_teacher"] / max(1.0, sums["tokens_taught"])
            taught["tokens_taught"] = sums["tokens_taught"]
        return {
            **{name: sums[name] / max(1.0, sums["tokens"]) for name in (*PER_TOKEN, *named) if not absent.get(name)},
            **taught,
            **({"value_loss": sums["value_loss"] / max(1.0, sums["values"])} if algorithm.needs_critic else {}),
            "loss": sums["loss"] / max(1, minibatches),
            "tokens_trained": sums["tokens"],
            "tokens_computed": sums["tokens_computed"],
            **ratio_metrics(_joined(self.log_ratios), world),
            **mismatch_metrics(_joined(self.gaps), world),
            **drift_metrics(_joined(self.drifts), world),
        }

    def _names_of_own_metrics(self, world: World) -> list[str]:
        """The names that the user's loss function returned on any rank. Collective."""
        own = [name for name in self.sums if name.startswith(PREFIX)]
        return sorted({name for names in world.everyones(own) for name in names})


def mean(values: Sequence[float]) -> float:
    """The mean; 0 without values."""
    return sum(values) / max(1, len(values))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0), *parts])
