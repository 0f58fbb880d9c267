"""A step's checkpoint on disk: `checkpoints/step-000012-STEP_ID/`, complete or absent.

    meta.json    facts of the step: ids, version, trained trajectories, metrics; the sizes and the SHA-256 of the files
    state/       tensors in the format of torch.distributed.checkpoint: every rank writes and reads its own part, so
                 a run may resume on another number of ranks

Tensors are named PART/NAME:

    policy                              its trained parameters, float32, by their Hugging Face names
    policy_optimizer                    AdamW's moments of them
    reference                           the reference policy, where it is refreshed
    critic, critic_optimizer            where the algorithm has a critic
    rng                                 each rank's random state

    WRITING (a hidden draft folder) ──► COMPLETE (renamed) ──► removed by a newer one, or set aside as `stray-step-…`

A thread writes it (`Writing`). With `checkpoint_every: 1` the trainer waits for it before it completes the step in the
store. Otherwise it is written from a copy while the next steps go on. It holds all that completing its step needs. The
step id in the folder's name keeps an overtaken trainer from replacing its successor's checkpoint of the same step.
Older checkpoints are deleted only after the step is in the store.

The SHA-256 of `meta.json` is the checkpoint's digest. The store records it, so a later trainer can tell whether a
folder is the one that was written.

When a trainer starts, each folder that is newer than the checkpoint it resumes from was damaged, rolled back or made
with another database. The trainer renames it to `stray-step-…`, so that it cannot become the newest one later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from agentrl.domain.schemas import TrainedBatch

FORMAT = 3


STATE = "state"
META = "meta.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, in the run's folder."""


Parts = Mapping[str, Mapping[str, Tensor]]
"""Tensors by part and name; sharded tensors stay sharded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step's facts, as the store needs them to complete it."""

    step: int
    version: int  # the weights that the step made
    batch: TrainedBatch
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    record: StepRecord
    digest: str  # SHA-256 of meta.json, in hexadecimal; empty on ranks other than 0
    size_bytes: int  # of all files; 0 on ranks other than 0
    written_at: float = field(default=0.0, compare=False)  # of one that this process wrote, on rank 0; else 0


@dataclass(frozen=True, slots=True)
class Ignored:
    """A folder that the trainer cannot resume from, and why."""

    folder: Path
    why: str
