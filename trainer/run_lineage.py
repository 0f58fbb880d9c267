"""The interface between the trainer's loop and the store, for one epoch of one run.

Every rank has a `Lineage`. Rank 0 has a `StoredLineage`, which talks to the store; the other ranks have `NoLineage`,
which does nothing. No method is collective. The loop shares the facts that the other ranks need in explicit
collective calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agentrl.domain.evaluation import Evaluation
from agentrl.domain.schemas import Batch, ResumePlan
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.trainer.checkpoints.checkpoint import Ignored, StepRecord

CHECKPOINTED = "checkpointed"
"""The metric that says whether a step has left a checkpoint."""


class Lineage(Protocol):
    """One trainer epoch of one run."""

    @property
    def run_id(self) -> str:
        """The run."""

    @property
    def epoch(self) -> int:
        """Counts the trainers of the run; the store refuses writes of all but the newest."""

    def reconcile(self, checkpoint_step_id: str | None) -> ResumePlan:
        """Bring the store to the checkpoint's step."""

    def survives(self, step_id: str) -> bool:
        """Whether a step is of this run and was not rolled back."""

    def require_no_checkpoint(self, root: Path, ignored: Sequence[Ignored]) -> None:
        """Raise UserError when a trained step had a checkpoint: resuming without one would train everything again."""

    def version_path(self, version: int) -> str | None:
        """Where a version's weights were written; None for the base weights."""

    def remade(self, version: int, path: Path, checksum: str) -> None:
        """Record that a version's folder was written again from its checkpoint."""

    def check(self) -> None:
        """Raise FencedError once a newer trainer has started."""

    def is_stopping(self) -> bool:
        """Whether the run was asked to stop, or has failed elsewhere."""

    def wait_for_batch(self, step: int, for_s: float, pause: Callable[[float], bool]) -> Batch | None:
        """The step's batch as soon as enough groups are ready; None after `for_s`, or when told to stop."""

    def facts(self, batch: Batch) -> BatchFacts:
        """Facts about a batch from the store: rewards by name, task sources, calls."""

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a completed step."""

    def next_version(self) -> int:
        """A version number that was never used."""

    def complete(self, record: StepRecord, path: Path, checksum: str) -> None:
        """Record in one transaction that the step and its trajectories are trained and that its version is pending."""

    def checkpointed(self, record: StepRecord) -> None:
        """Record that a step, which was completed before, now has a durable checkpoint."""

    def unneeded(self, names: list[str], *, unknown: bool) -> set[str]:
        """The weight folders among `names` that no engine will be told to load."""

    def evaluations(self, from_step: int | None) -> list[Evaluation]:
        """The newest two evaluations that have begun; with `from_step` also those of that step and later ones."""

    def is_held(self, version: int) -> bool:
        """Whether `version` must wait for the evaluation of the version that is served."""

    def record(self, kind: str, start: float, end: float, **data: object) -> None:
        """Add something that took time to the run's timeline."""

    def finish(self) -> None:
        """Record that the run has all of its steps."""


class NoLineage:
    """The lineage of ranks other than 0: it knows nothing and records nothing."""

    run_id = ""
    epoch = 0

    def reconcile(self, checkpoint_step_id: str | None) -> ResumePlan:
        """Rank 0's plan is shared."""
        return ResumePlan(step=0, version=0, republish=None)

    def survives(self, step_id: str) -> bool:
        """Unknown here."""
        return False

    def require_no_checkpoint(self, root: Path, ignored: Sequence[Ignored]) -> None:
        """Nothing."""

    def version_path(self, version: int) -> str | None:
        """Unknown here."""
        return None

    def remade(self, version: int, path: Path, checksum: str) -> None:
        """Nothing."""

    def check(self) -> None:
        """Nothing."""

    def is_stopping(self) -> bool:
        """Rank 0 shares whether the run stops."""
        return False

    def wait_for_batch(self, step: int, for_s: float, pause: Callable[[float], bool]) -> Batch | None:
        """Rank 0's batch is shared; this returns at once."""
        return None

    def facts(self, batch: Batch) -> BatchFacts:
        """Unknown here."""
        return BatchFacts(rewards={}, sources={}, calls=0, truncated_calls=0)

    def metrics(self, step: int) -> dict[str, float]:
        """Unknown here."""
        return {}

    def next_version(self) -> int:
        """Rank 0's number is shared."""
        return 0

    def complete(self, record: StepRecord, path: Path, checksum: str) -> None:
        """Nothing."""

    def checkpointed(self, record: StepRecord) -> None:
        """Nothing."""

    def unneeded(self, names: list[str], *, unknown: bool) -> set[str]:
        """No folder is this rank's to delete."""
        return set()

    def evaluations(self, from_step: int | None) -> list[Evaluation]:
        """Unknown here."""
        return []

    def is_held(self, version: int) -> bool:
        """Rank 0 shares whether the version must wait."""
        return False

    def record(self, kind: str, start: float, end: float, **data: object) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""
