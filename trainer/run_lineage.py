"""The interface between the trainer's loop and the store, for one epoch of one run.

Rank 0 has a `StoredLineage`, which talks to the store; the other ranks have a `Lineage`, whose methods do nothing. Each
rank reads tokens by its own `reader`. No method is collective. The loop shares the facts that the other ranks need in
explicit collective calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.domain.batches.outline import BatchOutline
from agentrl.domain.evaluation import Evaluation
from agentrl.domain.schemas import Float32, ResumePlan, TokenFacts
from agentrl.store.training.batch_facts import BatchFacts
from agentrl.store.training.sample_rows import SampledRollout
from agentrl.trainer.batches.batch_reader import BatchReader
from agentrl.trainer.checkpoints.checkpoint import Checkpoint, Ignored, StepRecord

CHECKPOINTED = "checkpointed"
"""The metric that says whether a step has left a checkpoint."""


class Lineage:
    """One trainer epoch of one run, as ranks other than 0 know it: they read tokens and record nothing."""

    def __init__(self, run_id: str = "", epoch: int = 0, reader: BatchReader | None = None) -> None:
        self.run_id = run_id
        self.epoch = epoch  # counts the trainers of the run; the store refuses writes of all but the newest
        self.reader = reader  # of this rank

    def reconcile(self, checkpoint_step_id: str | None) -> ResumePlan:
        """Bring the store to the checkpoint's step."""
        return ResumePlan(step=0, version=0, republish=None)

    def survives(self, step_id: str) -> bool:
        """Whether a step is of this run and was not rolled back."""
        return False

    def require_no_checkpoint(self, root: Path, ignored: Sequence[Ignored]) -> None:
        """Raise UserError when a trained step had a checkpoint: resuming without one would train everything again."""

    def version_path(self, version: int) -> str | None:
        """The folder of a version's weights; None for the base weights."""
        return None

    def remade(self, version: int, path: Path, checksum: str) -> None:
        """Record that a version's folder was written again from its checkpoint, maybe in another `engine.dtype`."""

    def check(self) -> None:
        """Raise FencedError once a newer trainer has started."""

    def is_stopping(self) -> bool:
        """Whether the run was asked to stop, or has failed elsewhere."""
        return False

    def wait_for_batch(self, step: int, for_s: float, pause: Callable[[float], bool]) -> BatchOutline | None:
        """The step's batch as soon as enough groups are ready; None after `for_s`, or when told to stop."""
        return None

    def refuse(self, batch: BatchOutline, reasons: Mapping[str, str]) -> None:
        """Give a leased batch back; the groups in `reasons` are rejected with their reason."""

    def renew_memory_lease(self, lease_s: float) -> bool:
        """Extend the trainer's turn on the engines' GPUs; false when it is over. Does not wait for the database."""
        return False

    def facts(self, batch: BatchOutline) -> BatchFacts:
        """Facts about a batch from the store: rewards by name, task sources, calls."""
        return BatchFacts(rewards={}, sources={}, calls=0, truncated_calls=0)

    def task_sources(self, batch: BatchOutline) -> dict[str, str]:
        """Group → the source of `tasks` that its task came from."""
        return {}

    def teacher_logprobs(self, teacher: str, trajectory_ids: Sequence[str]) -> dict[str, Float32]:
        """Trajectory → what a server's logprobs of its sampled tokens were, where it was asked before."""
        return {}

    def keep_teacher_logprobs(self, teacher: str, found: Mapping[str, Float32]) -> None:
        """Keep a server's logprobs of trajectories' sampled tokens."""

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a completed step."""
        return {}

    def metrics_before(self, step: int, count: int) -> list[dict[str, float]]:
        """The metrics of at most `count` completed steps before `step`, oldest first."""
        return []

    def fail(self, reason: str) -> None:
        """Record that the run has failed, which ends its parts."""

    def samples(self, step_id: str, count: int) -> list[SampledRollout]:
        """At most `count` trajectories of a completed step, with their texts."""
        return []

    def next_version(self) -> int:
        """A version number that was never used."""
        return 0

    def keep_token_facts(self, step_id: str, facts: Mapping[str, TokenFacts]) -> None:
        """Keep facts of a leased step's tokens, by trajectory."""

    def complete(self, record: StepRecord, path: Path, checksum: str) -> None:
        """Record in one transaction that the step and its trajectories are trained and that its version is pending."""

    def checkpointed(self, made: Checkpoint) -> None:
        """Record that a completed step has a durable checkpoint, with its digest."""

    def stored(self, step_ids: Sequence[str]) -> None:
        """Record that object storage has these steps' checkpoints."""

    def checkpoint_digest(self, step_id: str) -> str | None:
        """The digest of a step's checkpoint, if one was recorded."""
        return None

    def evaluation(self, version: int) -> Evaluation | None:
        """The evaluation of one version so far; None before it has begun."""
        return None

    def unneeded(self, names: list[str], *, unknown: bool) -> set[str]:
        """The weight folders among `names` that no engine will load any more."""
        return set()

    def evaluations(self, from_step: int | None) -> list[Evaluation]:
        """The newest two evaluations that have begun; with `from_step` also those of that step and later ones."""
        return []

    def is_held(self, version: int) -> bool:
        """Whether `version` must wait for the evaluation of the version that is served."""
        return False

    def record(self, kind: str, start: float, end: float, **data: object) -> None:
        """Add an event with a start and an end to the run's timeline."""

    def started_with(self) -> dict[str, Any]:
        """The facts that the run's newest trainer recorded at its start; empty before the first."""
        return {}

    def finish(self) -> None:
        """Record that the run has all of its steps."""
