"""How far each engine's logprobs are from the trainer's, where both computed with the same weights.

    gaps of a microbatch's tokens ─► sums of each call, on this rank ─► of all ranks ─► means by engine and by backend

The store knows which engine sampled a call. A call that several engines sampled, because one died, is counted apart.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import torch
from torch import Tensor

from agentrl.domain.batches.outline import Outline
from agentrl.store.training.batch_facts import SampledBy
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.batch_metrics import LABELS_KEPT, Metrics

SEVERAL = "several"
"""The label of calls that more than one engine sampled."""
Turn = tuple[str, int]
"""A trajectory, and the index of one of its calls."""


@dataclass(slots=True)
class CallGaps:
    """The number of compared tokens of each call, and the sum of their |d|, on this rank."""

    of: dict[Turn, tuple[int, float]] = field(default_factory=dict)

    def add(self, gap_S: Tensor, turns_S: Tensor, trajectory_ids: Sequence[str], first_turns: Sequence[int]) -> None:
        """Add tokens of a microbatch; `first_turns` are the numbers of turns before each of its trajectories."""
        turns, places = torch.unique(turns_S, return_inverse=True)
        counts, sums = torch.bincount(places), torch.bincount(places, weights=gap_S.double().abs())
        for turn, count, total in zip(turns.tolist(), counts.tolist(), sums.tolist(), strict=True):
            at = bisect_right(first_turns, turn) - 1
            self._count((trajectory_ids[at], turn - first_turns[at]), count, total)

    def merge(self, other: CallGaps) -> None:
        """Add all of another's."""
        for turn, (count, total) in other.of.items():
            self._count(turn, count, total)

    def gathered(self, world: World) -> CallGaps:
        """Those of all data ranks. Collective."""
        found = CallGaps()
        for theirs in world.everyones(self.of)[:: world.mesh.sharing]:
            found.merge(CallGaps(theirs))
        return found

    def _count(self, turn: Turn, count: int, total: float) -> None:
        counted, summed = self.of.get(turn, (0, 0.0))
        self.of[turn] = counted + count, summed + total


def engine_metrics(gaps: CallGaps, batch: Sequence[Outline], engines: Mapping[str, SampledBy]) -> Metrics:
    """Mean |d| and tokens by engine, the LABELS_KEPT with most tokens, and by backend. `engines`: by call id."""
    calls = {one.trajectory_id: one.calls for one in batch}
    by_name: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for (trajectory, turn), (count, total) in gaps.of.items():
        for name in _names(engines.get(calls[trajectory][turn])):
            counted, summed = by_name[name]
            by_name[name] = counted + count, summed + total
    most = sorted(by_name.items(), key=lambda one: (one[0].startswith("engine/"), -one[1][0]))
    found: Metrics = {}
    for name, (count, total) in most[:LABELS_KEPT]:
        kind, _, label = name.partition("/")
        found |= {f"mismatch/{kind}/{label}": total / count, f"mismatch/{kind}_tokens/{label}": float(count)}
    return found


def _names(engine: SampledBy | None) -> list[str]:
    """The labels under which a call's tokens are counted."""
    if engine is None:
        return []
    if engine.several:
        return [f"engine/{SEVERAL}"]
    named = [] if engine.backend is None else [f"backend/{engine.backend}"]
    return [*named, f"engine/{urlsplit(engine.url).netloc}"]
