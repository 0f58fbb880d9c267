"""How a weight version reaches an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentrl.errors import EngineError
from agentrl.proxy.engines.tensor_transfer import Transfer


class EngineBusy(EngineError):
    """The engine is paused, and another replica, or its operator, has to continue it."""


@dataclass(frozen=True, slots=True)
class RecordedFolder:
    """A version's folder and the checksum of its tensors, as the store has them; None: the base model's."""

    path: str | None
    checksum: str | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a version reaches the engines: by a transfer, else from its folder."""

    transfer: Transfer | None = None
    digests: dict[str, str] = field(default_factory=dict)  # of its tensors, by the names that engines use
    n_bytes: int | None = None
    folder: RecordedFolder | None = None  # as read for all engines of a publish; None: read for each engine


BY_FOLDER = Delivery()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How an engine loaded a version."""

    stall_s: float  # how long the engine was paused
    transport: str
    verified: int = 0  # number of tensors compared with the trainer's
