"""The state of one rank of the trainer during a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentrl import visible
from agentrl.configs.run_config import RunConfig
from agentrl.storage.object_store import ObjectStore
from agentrl.trainer.algorithms.user_functions import Functions
from agentrl.trainer.batches.read_ahead import ReadAhead
from agentrl.trainer.checkpoints.checkpoint import CHECKPOINTS, StepRecord
from agentrl.trainer.checkpoints.checkpoint_pace import CheckpointPace
from agentrl.trainer.checkpoints.checkpoint_writer import Writing
from agentrl.trainer.checkpoints.stored_checkpoints import StoredCheckpoints
from agentrl.trainer.distributed import World
from agentrl.trainer.metrics.evaluation_metrics import EvaluationReports
from agentrl.trainer.metrics.metric_sinks import Sinks
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.run_models import Models
from agentrl.trainer.publish.publish_client import Publisher
from agentrl.trainer.run.lease_renewal import Renewal
from agentrl.trainer.run.trainer_start import compared_dtype, engine_dtype
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.stop import Stop
from agentrl.trainer.teachers.teaching import Teaching
from agentrl.trainer.weights.mooncake_copy import MooncakeCopy
from agentrl.trainer.weights.saved_models import SavedModels
from agentrl.trainer.weights.version_writer import VersionWriter
from agentrl.versions.weights_folder import folder_name


@dataclass(slots=True)
class Trainer:
    """The loop's state. On ranks other than 0 `lineage` only reads tokens, and `sinks` and `evaluations` do nothing."""

    config: RunConfig
    base_model: Path
    world: World
    models: Models
    optimizer: torch.optim.Optimizer
    lineage: Lineage
    publisher: Publisher | None  # rank 0 has one
    stop: Stop
    from_base: bool = False
    functions: Functions = field(default_factory=Functions)  # the user's, in place of parts of the algorithm
    stored: StoredCheckpoints | None = None  # rank 0 may have them
    saved_models: SavedModels | None = None  # rank 0 may have them
    stored_weights: ObjectStore | None = None  # versions beside the disk, for rank 0
    step: int = 0
    version: int = 0
    checkpointed: int = 0  # the step of the newest checkpoint
    writing: Writing | None = None  # a checkpoint that is being written
    pace: CheckpointPace = field(init=False)  # of checkpoints
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)  # metrics of complete evaluations, by version
    writer: VersionWriter = field(init=False)  # of versions
    mooncake: MooncakeCopy = field(init=False)  # of versions, for engines' hosts
    publish_s: float = 0.0
    warned_over_budget: bool = False
    knows_metrics: bool = False  # whether a step's metrics have been compared with those that alarms name
    teaching: Teaching | None = None  # where there is a teacher
    ahead: ReadAhead | None = None  # since the first step
    renewal: Renewal | None = None  # of the lease on the GPUs' memory, on rank 0
    sinks: Sinks = field(default_factory=Sinks.none)
    evaluations: EvaluationReports = field(default_factory=EvaluationReports.none)

    def __post_init__(self) -> None:
        config, device = self.config, self.world.device
        self.pace = CheckpointPace(config.trainer.checkpoint_every)
        self.mooncake = MooncakeCopy(config.publish.mooncake, config.name, self.world)
        self.writer = VersionWriter(
            self.world,
            self.base_model,
            self.policy.names,
            config.trainer.lora,
            engine_dtype(config, device),
            config.publish,
            compared_dtype(config, device),
        )

    @property
    def policy(self) -> Policy:
        """The model that is trained."""
        return self.models.policy

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.config.run_dir / CHECKPOINTS

    @property
    def weights(self) -> Path:
        """Folder of the versions that engines load."""
        return self.config.run_dir / "weights"


def weights_folder(t: Trainer, record: StepRecord) -> Path:
    """The folder of the version that a step makes."""
    return t.weights / folder_name(record.version, record.batch.step_id)


def say(t: Trainer, text: str) -> None:
    """Print on rank 0."""
    if t.world.leads:
        visible.say(text)
