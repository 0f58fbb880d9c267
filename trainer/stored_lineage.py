"""Rank 0's lineage: reads a run from the store and records its steps there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.configs.run_config import RunConfig
from agentrl.configs.trainer_config import Auto
from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.batches.reward_scaling import scales_of
from agentrl.domain.evaluation import Evaluation
from agentrl.domain.schemas import Float32, Json, ResumePlan, StepState, TokenFacts
from agentrl.errors import UserError
from agentrl.store import Connection, Database, evaluation_episodes, events, runs
from agentrl.store.db.codec import new_id
from agentrl.store.training import (
    batch_facts,
    checkpoint_rows,
    memory_leases,
    sample_rows,
    step_resume,
    steps,
    token_facts,
    trainer_epochs,
    version_states,
)
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.store.training.paths import teacher_logprobs
from agentrl.store.training.replaying.replays import rule_of
from agentrl.store.training.sample_rows import SampledRollout
from agentrl.trainer.batches.batch_reader import BatchReader
from agentrl.trainer.batches.token_cache import TokenCache
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, Ignored, StepRecord
from agentrl.trainer.run_lineage import CHECKPOINTED, Lineage

POLL_S = 0.2


class StoredLineage(Lineage):
    """One trainer epoch of one run, in the store.

    `check` and the methods that change the run's steps raise FencedError once a newer trainer has started:
    `reconcile`, `wait_for_batch` (it leases groups), `refuse`, `keep_teacher_logprobs`, `complete`, `remade`,
    `checkpointed`, `stored`, `fail` and `finish`. Reading and `record` still work.
    """

    def __init__(self, database: Database, run_id: str, epoch: int, config: RunConfig) -> None:
        super().__init__(run_id, epoch, reader_of(database, config))
        self.database = database
        self.config = config

    @classmethod
    def begin(cls, database: Database, config: RunConfig) -> StoredLineage:
        """Start a new epoch: the store then refuses older trainers of the run. Raises UserError for an unknown run."""
        run = database.query(runs.by_name, config.name)
        return cls(database, run.id, database.transact(trainer_epochs.begin_epoch, run.id), config)

    @classmethod
    def of(cls, database: Database, config: RunConfig) -> StoredLineage:
        """Read the run's lineage without starting an epoch. Raises UserError for an unknown run."""
        run = database.query(runs.by_name, config.name)
        return cls(database, run.id, run.trainer_epoch, config)

    def reconcile(self, checkpoint_step_id: str | None) -> ResumePlan:
        """Bring the store to the checkpoint's step."""
        return self.database.transact(step_resume.reconcile, self.run_id, self.epoch, checkpoint_step_id)

    def survives(self, step_id: str) -> bool:
        """Whether a step is of this run and was not rolled back."""
        return self.database.query(steps.survives, self.run_id, step_id)

    def require_no_checkpoint(self, root: Path, ignored: Sequence[Ignored]) -> None:
        """Raise UserError when a trained step had a checkpoint: resuming without one would train everything again."""
        trained = [step for step in self.database.query(steps.of_run, self.run_id) if step.state != StepState.STARTED]
        if not any(_was_checkpointed(step, self.config.trainer.checkpoint_every) for step in trained):
            return
        found = "; ".join(f"{i.folder.name}: {i.why}" for i in ignored) if root.is_dir() else ""
        state = f"has no usable checkpoint ({found or 'it is empty'})" if root.is_dir() else "does not exist"
        raise UserError(
            f"run {self.config.name!r} is trained up to step {trained[-1].step}, but {root.resolve()} {state}: start "
            "it where its folder is, or restore the folder; --from-base trains all of it again from the base weights"
        )

    def check(self) -> None:
        """Raise FencedError once a newer trainer has started."""
        self.database.transact(trainer_epochs.check_epoch, self.run_id, self.epoch)

    def failure(self) -> str | None:
        """Why the run failed elsewhere; None when it did not."""
        run = self.database.query(runs.get, self.run_id)
        return f"run {run.name} is failed: {run.error or 'no reason was given'}" if run.status == "failed" else None

    def is_stopping(self) -> bool:
        """Whether the run was asked to stop, or has failed elsewhere."""
        return self.database.query(runs.get, self.run_id).status in ("stopping", "failed")

    def wait_for_batch(self, step: int, for_s: float, pause: Callable[[float], bool]) -> BatchOutline | None:
        """The step's batch as soon as enough groups are ready; None after `for_s`, or when told to stop."""
        trainer, replay = self.config.trainer, rule_of(self.config.rollout.replay)
        until = time.monotonic() + for_s
        while time.monotonic() < until and not self.is_stopping():
            step_id = self.database.transact(
                steps.lease,
                self.run_id,
                self.epoch,
                step=step,
                n_groups=trainer.groups_per_step,
                max_staleness=trainer.max_staleness,
                discount=self.config.rollout.turn_discount,
                stale_policy=trainer.stale_policy,
                skip_tied=trainer.algorithm.dynamic_sampling,
                needs_greedy=trainer.algorithm.needs_greedy,
                scales=scales_of(self.config.reward),
                replay=replay,
            )
            if step_id is not None:
                return self.database.query(steps.outlined, step_id)
            if pause(POLL_S):
                return None
        return None

    def refuse(self, batch: BatchOutline, reasons: Mapping[str, str]) -> None:
        """Give a leased batch back; the groups in `reasons` are rejected with their reason."""
        self.database.transact(steps.refuse, self.run_id, self.epoch, batch.step_id, reasons)

    def renew_memory_lease(self, lease_s: float) -> bool:
        """Extend the trainer's turn on the engines' GPUs; false when it is over. Does not wait for the database."""
        with self.database.write() as conn:
            return memory_leases.renew(conn, self.run_id, self.epoch, lease_s)

    def facts(self, batch: BatchOutline) -> BatchFacts:
        """Facts about a batch from the store: rewards by name, task sources, calls."""
        return self.database.query(batch_facts.read, batch.step_id)

    def task_sources(self, batch: BatchOutline) -> dict[str, str]:
        """Group → the source of `tasks` that its task came from."""
        return self.database.query(batch_facts.task_sources, batch.step_id)

    def teacher_logprobs(self, teacher: str, trajectory_ids: Sequence[str]) -> dict[str, Float32]:
        """Trajectory → what a server's logprobs of its sampled tokens were, where it was asked before."""
        return self.database.query(teacher_logprobs.read, teacher, trajectory_ids)

    def keep_teacher_logprobs(self, teacher: str, found: Mapping[str, Float32]) -> None:
        """Keep a server's logprobs of trajectories' sampled tokens."""
        self.database.transact(teacher_logprobs.keep, self.run_id, self.epoch, teacher, found)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a completed step."""
        return dict(self.database.query(steps.of_run, self.run_id, step - 1)[0].metrics)

    def metrics_before(self, step: int, count: int) -> list[dict[str, float]]:
        """The metrics of at most `count` completed steps before `step`, oldest first."""
        rows = self.database.query(steps.of_run, self.run_id, max(0, step - 1 - count))
        return [dict(row.metrics) for row in rows if row.step < step]

    def fail(self, reason: str) -> None:
        """Record that the run has failed, which ends its parts."""
        self.database.transact(steps.fail_run, self.run_id, self.epoch, reason)

    def samples(self, step_id: str, count: int) -> list[SampledRollout]:
        """At most `count` trajectories of a completed step, with their texts."""
        return self.database.query(sample_rows.read, step_id, count)

    def evaluations(self, from_step: int | None) -> list[Evaluation]:
        """The newest two evaluations that have begun; with `from_step` also those of that step and later ones."""
        run = self.database.query(runs.get, self.run_id)
        return self.database.query(evaluation_episodes.newest, run, from_step)

    def is_held(self, version: int) -> bool:
        """Whether `version` must wait for the evaluation of the version that is served."""
        return self.database.query(evaluation_episodes.paused, self.run_id, version, self.config)

    def next_version(self) -> int:
        """The next version number; numbers are never reused."""
        return self.database.query(version_states.next_version, self.run_id)

    def version_path(self, version: int) -> str | None:
        """The folder of a version's weights; None for the base weights."""
        row = self.database.query(runs.version, self.run_id, version)
        return None if row is None else row.path

    def unneeded(self, names: list[str], *, unknown: bool) -> set[str]:
        """The weight folders among `names` that no engine will load any more.

        The store needs the version that the run serves and the newest KEEP_VERSIONS (version_states.py) that were not
        rolled back. A folder that the store does not know is another trainer's; `unknown` says whether it counts as
        unneeded.
        """
        return self.database.query(
            version_states.unneeded_folders, self.run_id, names, keep=version_states.KEEP_VERSIONS, unknown=unknown
        )

    def keep_token_facts(self, step_id: str, facts: Mapping[str, TokenFacts]) -> None:
        """Keep facts of a leased step's tokens, by trajectory."""
        self.database.transact(token_facts.record, self.run_id, self.epoch, step_id, facts)

    def complete(self, record: StepRecord, path: Path, checksum: str) -> None:
        """Record in one transaction that the step and its trajectories are trained and that its version is pending."""
        self.database.transact(
            steps.complete,
            self.run_id,
            self.epoch,
            record.batch,
            metrics=dict(record.metrics),
            version=record.version,
            path=str(path),
            checksum=checksum,
        )

    def remade(self, version: int, path: Path, checksum: str) -> None:
        """Record that a version's folder was written again from its checkpoint, maybe in another `engine.dtype`."""
        self.database.transact(
            version_states.set_folder, self.run_id, self.epoch, version, path=str(path), checksum=checksum
        )

    def checkpointed(self, made: Checkpoint) -> None:
        """Record that a completed step has a durable checkpoint, with its digest."""
        step_id = made.record.batch.step_id

        def unit(conn: Connection) -> None:
            checkpoint_rows.record(
                conn, self.run_id, self.epoch, step_id, digest=made.digest, size_bytes=made.size_bytes
            )
            steps.add_metrics(conn, self.run_id, self.epoch, step_id, {CHECKPOINTED: 1.0})

        self.database.transact(unit)

    def stored(self, step_ids: Sequence[str]) -> None:
        """Record that object storage has these steps' checkpoints."""
        if step_ids:
            self.database.transact(checkpoint_rows.set_stored, self.run_id, self.epoch, list(step_ids))

    def checkpoint_digest(self, step_id: str) -> str | None:
        """The digest of a step's checkpoint, if one was recorded."""
        return self.database.query(checkpoint_rows.digest_of, step_id)

    def evaluation(self, version: int) -> Evaluation | None:
        """The evaluation of one version so far; None before it has begun."""
        return self.database.query(evaluation_episodes.of_version, self.run_id, version)

    def record(self, kind: str, start: float, end: float, **data: object) -> None:
        """Add an event with a start and an end to the run's timeline."""
        facts: Json = {"start": start, "end": end, **data}
        self.database.transact(events.record, self.run_id, kind, facts, "trainer", new_id())

    def started_with(self) -> Json:
        """The facts that the run's newest trainer recorded at its start; empty before the first."""
        recorded = self.database.query(events.newest_of, self.run_id, events.TRAINER_STARTED)
        return {} if recorded is None else dict(recorded.data)

    def finish(self) -> None:
        """Record that the run has all of its steps."""
        self.database.transact(steps.finish, self.run_id, self.epoch)


def reading_lineage(database: Database, config: RunConfig) -> Lineage:
    """The lineage of a rank other than 0. Raises UserError for an unknown run."""
    return Lineage(database.query(runs.by_name, config.name).id, reader=reader_of(database, config))


def reader_of(database: Database, config: RunConfig) -> BatchReader:
    """The reader of one rank."""
    return BatchReader(database, TokenCache(config.trainer.read_ahead_bytes))


def _was_checkpointed(step: Any, checkpoint_every: int | Auto) -> bool:
    """Whether a step left a checkpoint. Older releases did not record this; for their steps the interval decides."""
    checkpointed = step.metrics.get(CHECKPOINTED)
    interval = 1 if checkpoint_every == "auto" else checkpoint_every
    return bool(step.step >= interval if checkpointed is None else checkpointed)
