"""Leases a step's batch on rank 0, and gives every rank its outlines. Tokens are read later, by the rank that trains
them.

`should_accept` and `trainer.over_budget` may refuse groups first; only `should_accept` needs tokens, which rank 0
reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.batches.outline_message import pack, unpack
from agentrl.domain.schemas import TrajectoryTokens
from agentrl.trainer.batches.batch_reader import BatchReader
from agentrl.trainer.batches.leased_batch import LeasedBatch
from agentrl.trainer.distributed import HEARTBEAT_S
from agentrl.trainer.run import over_budget, step_checkpoint
from agentrl.trainer.run.trainer_state import Trainer

LONGEST_REASON = 100
NOT_ACCEPTED = "should_accept"
"""The reason of a group for which `should_accept` returned false."""

ShouldAccept = Callable[[Sequence[TrajectoryTokens]], bool | str]
"""Gets a group's trajectories; returns whether they train, or the reason why not. Called on rank 0, maybe again."""


def next_batch(t: Trainer, should_accept: ShouldAccept | None = None) -> tuple[LeasedBatch | None, float]:
    """The next step's batch and the seconds waited for it; None when told to stop. Collective."""
    start = time.time()
    while True:
        step_checkpoint.collect(t, wait=False)
        stopping = t.stop.is_set() or t.lineage.is_stopping()
        found = None if stopping else t.lineage.wait_for_batch(t.step + 1, HEARTBEAT_S, t.stop.wait)
        if found is not None and (reasons := refused_groups(t, found, should_accept)):
            t.lineage.refuse(found, reasons)
            found = None
        leased, stopping = t.world.share((found is not None, stopping))
        if stopping:
            return None, 0.0
        if leased:
            end = time.time()
            batch = LeasedBatch(shared(t, found), reader(t))
            t.lineage.record("wait_for_batch", start, end, step=batch.step)
            if t.ahead is not None:
                t.ahead.stop()
            return batch, end - start


def shared(t: Trainer, found: BatchOutline | None) -> BatchOutline:
    """Rank 0's outline, on every rank. Collective."""
    if t.world.size == 1:
        assert found is not None
        return found
    raw = t.world.share_bytes(None if found is None else pack(found))
    return found if found is not None else unpack(raw)


def reader(t: Trainer) -> BatchReader:
    """This rank's reader."""
    assert t.lineage.reader is not None
    return t.lineage.reader


def refused_groups(t: Trainer, found: BatchOutline, should_accept: ShouldAccept | None) -> dict[str, str]:
    """Group → why it does not train. Reads the whole batch where `should_accept` must see it. On rank 0."""
    reasons = over_budget.refused_groups(t, found.fresh)  # replays were accepted before
    if should_accept is None:
        return reasons
    return reasons | refused(reader(t).read(found.fresh), should_accept)


def refused(batch: Iterable[TrajectoryTokens], should_accept: ShouldAccept) -> dict[str, str]:
    """Group → the reason why `should_accept` refuses it."""
    groups: dict[str, list[TrajectoryTokens]] = {}
    for trajectory in batch:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    verdicts = {group_id: should_accept(trajectories) for group_id, trajectories in groups.items()}
    return {
        group_id: (said[:LONGEST_REASON] if isinstance(said, str) else "") or NOT_ACCEPTED
        for group_id, said in verdicts.items()
        if isinstance(said, str) or not said
    }
