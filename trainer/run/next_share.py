"""What this rank reads ahead: its share of the batch that will most likely be leased next."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.batches.outline import Outline
from agentrl.store import Database
from agentrl.store.training.paths import next_batch
from agentrl.trainer.batches.read_ahead import ReadAhead
from agentrl.trainer.run.batch_lease import reader
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.scoring import planned_ranks


def read_ahead(t: Trainer) -> ReadAhead:
    """This rank's thread, not started."""
    config, world = t.config.trainer, t.world
    budget = t.policy.budget(config.token_budget)
    known = ReadyGroups(reader(t).database, t.lineage.run_id, config.max_staleness)

    def guess() -> list[Outline]:
        return known.oldest(config.groups_per_step, t.version)

    def mine(batch: Sequence[Outline]) -> list[int]:
        ranks = planned_ranks(batch, config.algorithm, config.minibatches, budget, world.data_size)
        return [i for i, rank in enumerate(ranks) if rank == world.data_rank and batch[i].computed_tokens]

    return ReadAhead(reader(t), guess, mine)


class ReadyGroups:
    """Outlines of ready groups. It reads a group once for each version."""

    def __init__(self, database: Database, run_id: str, max_staleness: int) -> None:
        self._database, self._run_id, self._max_staleness = database, run_id, max_staleness
        self._known: dict[str, list[Outline]] = {}
        self._version = -1

    def oldest(self, count: int, version: int) -> list[Outline]:
        """Those of the oldest groups, for a step that starts from `version`."""
        groups = self._database.query(next_batch.oldest, self._run_id, count)
        kept = {name: self._known[name] for name in groups if name in self._known and version == self._version}
        new = [name for name in groups if name not in kept]
        if new:
            how = {"version": version, "max_staleness": self._max_staleness}
            kept |= self._database.query(next_batch.read, self._run_id, new, **how)
        self._known, self._version = kept, version
        return [one for name in groups for one in kept.get(name, ())]
