"""The trainer's loop.

      store                        rank 0 (all ranks where marked ∀)                          proxy
        │  begin_epoch, reconcile ◄── start: newest complete checkpoint ∀ loaded
        │  complete ◄──────────────── roll forward, if the checkpoint is ahead of the store
        │                             republish, if the engines may not serve its version ──────► publish
        │
        │  ┌──────────────────────────────────────────────────────────────────────────────┐
        ├──┼─ lease ────────────────► batch ∀                                               │
        │  │                           └► advantages ∀ ─► update ∀ ─► checkpoint ∀          │
        ├──┼─ complete {trained, version pending} ◄───────────────────┘                     │
        │  │                                            └─ publish ─────────────────────────┼──► engines load vN
        │  └────────────────────────── next step ◄─────────────────── vN serves ◄───────────┘
        ▼
   run finished: the whole model is exported

A checkpoint is durable before `complete` with `checkpoint_every: 1` and at the last step. Otherwise a thread of each
rank writes it during the next steps (run/step_checkpoint.py), and a death repeats the steps after the newest one.

Who waits for whom:

    lease      waits until enough groups are ready; agents unblock it
    step       where trainer and engines take turns on the same GPUs (`gpu_turn`), waits until engines have released
               their memory; their calls wait until the publish
    publish    waits for the proxy, which waits for its engines; with `evaluation.hold` it waits first for the
               evaluation of the version that is served
    admission  in the proxy, starts no new group that would become older than max_staleness; nothing else waits for
               the trainer

SIGTERM, SIGINT and the run status `stopping` end every wait. They never interrupt a step: the trainer finishes,
checkpoints and completes it first. ∀ marks the work of every rank; rank 0 alone does the rest (run_lineage.py).
"""

from __future__ import annotations

from pathlib import Path

from agentrl.configs.run_config import RunConfig
from agentrl.trainer.distributed import World
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.stop import Stop
from agentrl.trainer.training_run import opened


def train(
    config: RunConfig,
    base_model: Path,
    world: World,
    lineage: Lineage,
    publisher: Publisher | None,
    stop: Stop,
    *,
    from_base: bool = False,
) -> bool:
    """Train until the run has its steps (true) or is told to stop (false). Collective. Raises as `opened` does."""
    with opened(config, base_model, world, lineage, publisher, stop, from_base=from_base) as run:
        while (batch := run.prepare_batch()) is not None:
            run.update(batch)
            run.save()
            run.publish()
    return run.finished
