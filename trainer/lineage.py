"""Rank 0's side of the store: one trainer epoch of one run, and the facts a step leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.configs.run_config import RunConfig
from agentrl.domain.schemas import (
    Batch,
    Json,
    ResumePlan,
    StepState,
    TrainedTrajectory,
)
from agentrl.errors import UserError
from agentrl.store import Connection, Database, Row, events, runs
from agentrl.store.db.codec import new_id
from agentrl.store.training import batch_facts, step_resume, steps, trainer_epochs, version_states
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.trainer.checkpoints.checkpoint import Ignored, StepRecord
from agentrl.trainer.packing import Sample
from agentrl.weights_folder import version_of

POLL_S = 0.2
KEEP_VERSIONS = 3
CHECKPOINTED = "checkpointed"
"""The metric that says whether a step has left a checkpoint."""


@dataclass(slots=True)
class Lineage:
    """What writes to the run's steps, and `check`, raises FencedError once a newer trainer has started.

    That is `reconcile`, `wait_for_batch` (its lease), `complete` and `finish`. Reading goes on, and so does `record`:
    what took time did so whoever is in charge.
    """

    database: Database
    run_id: str
    epoch: int
    config: RunConfig

    @classmethod
    def begin(cls, database: Database, config: RunConfig) -> Lineage:
        """Start a new epoch; older trainers of the run are fenced from here on. Raises UserError for an unknown run."""
        run = database.query(runs.by_name, config.name)
        return cls(database, run.id, database.transact(trainer_epochs.begin_epoch, run.id), config)

    @classmethod
    def of(cls, database: Database, config: RunConfig) -> Lineage:
        """The run's lineage, to read: under the epoch that is going on. Raises UserError for an unknown run."""
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
        """Why the run has failed elsewhere; None while it has not."""
        run = self.database.query(runs.get, self.run_id)
        return f"run {run.name} is failed: {run.error or 'no reason was given'}" if run.status == "failed" else None

    def is_stopping(self) -> bool:
        """Somebody asked the run to stop, or it failed elsewhere."""
        return self.database.query(runs.get, self.run_id).status in ("stopping", "failed")

    def wait_for_batch(self, step: int, for_s: float, pause: Callable[[float], bool]) -> Batch | None:
        """The step's batch as soon as enough groups are ready; None after `for_s`, or when told to stop."""
        trainer = self.config.trainer
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
            )
            if step_id is not None:
                return self.database.query(steps.batch, step_id)
            if pause(POLL_S):
                return None
        return None

    def facts(self, batch: Batch) -> BatchFacts:
        """What else the store knows of a batch."""
        return self.database.query(batch_facts.read, batch.step_id)

    def metrics(self, step: int) -> dict[str, float]:
        """Of a completed step."""
        return dict(self.database.query(steps.of_run, self.run_id, step - 1)[0].metrics)

    def next_version(self) -> int:
        """A version number that was never used."""
        return self.database.query(version_states.next_version, self.run_id)

    def version_path(self, version: int) -> str | None:
        """Where a version's weights were written; None for the base weights."""
        row = self.database.query(runs.version, self.run_id, version)
        return None if row is None else row.path

    def unneeded(self, names: list[str], *, strangers: bool) -> set[str]:
        """Of these weight folders, those that no engine will be told to load.

        Needed are the version that the run serves and the newest KEEP_VERSIONS that survive. Folders that the store
        does not know are another trainer's: `strangers` says whether they count as not needed.
        """
        return self.database.query(_unneeded, self.run_id, names, strangers)

    def complete(self, record: StepRecord, path: Path, checksum: str) -> None:
        """One transaction {step and trajectories trained, version pending}."""
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
        """A version's folder has been made from its checkpoint; `engine.dtype` may have changed since it was first."""
        self.database.transact(
            version_states.set_folder, self.run_id, self.epoch, version, path=str(path), checksum=checksum
        )

    def checkpointed(self, record: StepRecord) -> None:
        """The step, which was completed before, is durable now."""
        self.database.transact(steps.add_metrics, self.run_id, self.epoch, record.batch.step_id, {CHECKPOINTED: 1.0})

    def record(self, kind: str, start: float, end: float, **data: object) -> None:
        """Put something that took time on the timeline."""
        facts: Json = {"start": start, "end": end, **data}
        self.database.transact(events.record, self.run_id, kind, facts, "trainer", new_id())

    def finish(self) -> None:
        """The run has all its steps."""
        self.database.transact(_finish, self.run_id, self.epoch)


def _finish(conn: Connection, run_id: str, epoch: int) -> None:
    trainer_epochs.check_epoch(conn, run_id, epoch)
    runs.set_status(conn, run_id, "finished")


def _unneeded(conn: Connection, run_id: str, names: list[str], strangers: bool) -> set[str]:
    needed = {*runs.newest_versions(conn, run_id, KEEP_VERSIONS), runs.get(conn, run_id).current_version}
    out = set()
    for name in names:
        row = runs.version(conn, run_id, version_of(name) or 0)
        if row is None or row.path is None or Path(row.path).name != name:
            unneeded = strangers
        else:
            unneeded = row.version not in needed
        if unneeded:
            out.add(name)
    return out


def _was_checkpointed(step: Row[Any], checkpoint_every: int) -> bool:
    """Steps of older releases do not say it: then by the interval."""
    said = step.metrics.get(CHECKPOINTED)
    return bool(step.step >= checkpoint_every if said is None else said)


def trained_trajectories(batch: Batch, samples: Sequence[Sample]) -> list[TrainedTrajectory]:
    """What the step does with each trajectory that has loss tokens."""
    out = []
    for sample in samples:
        mask = sample.tokens.loss_mask
        if mask.any():
            ages = np.array([batch.ages[version] for version in sample.tokens.versions[mask].tolist()])
            out.append(
                TrainedTrajectory(
                    trajectory_id=sample.tokens.trajectory_id,
                    advantage=float(np.nan_to_num(sample.advantages[mask].mean())),  # of NaN, nothing was learned
                    staleness_max=int(ages.max()),
                    staleness_mean=float(ages.mean()),
                    tokens_trained=int(mask.sum()),
                )
            )
    return out
