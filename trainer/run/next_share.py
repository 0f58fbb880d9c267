"""What this rank reads ahead: its share of the batch that will most likely be leased next."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.domain.batches.outline import Outline
from agentrl.store.training.paths import next_batch
from agentrl.trainer.batches.read_ahead import ReadAhead
from agentrl.trainer.run.batch_lease import reader
from agentrl.trainer.run.trainer_state import Trainer
from agentrl.trainer.scoring import planned_ranks


def read_ahead(t: Trainer) -> ReadAhead:
    """This rank's thread, not started."""
    config, world, database = t.config.trainer, t.world, reader(t).database
    budget = t.policy.budget(config.token_budget)

    def guess() -> list[Outline]:
        return database.query(
            next_batch.read,
            t.lineage.run_id,
            n_groups=config.groups_per_step,
            version=t.version,
            max_staleness=config.max_staleness,
        )

    def mine(batch: Sequence[Outline]) -> list[int]:
        ranks = planned_ranks(batch, config.algorithm, config.minibatches, budget, world.data_size)
        return [i for i, rank in enumerate(ranks) if rank == world.data_rank and batch[i].computed_tokens]

    return ReadAhead(reader(t), guess, mine)
