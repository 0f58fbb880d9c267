"""How a weight version reaches an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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
Source = Literal["origin", "peer", "host"]
"""From where an engine's host read a version: the folder, storage or a proxy; another engine; or it read nothing, since
it had the version, or uses the folder in place.
"""


KEPT = "kept"
"""In place of a transport: the engine keeps its version until it has no calls (`publish.lag`)."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that an engine holds beside the one that it serves."""

    name: str  # its folder's
    n_bytes: int  # that the engine's host read for it
    seconds: float  # from the order until it was ready
    source: Source
    verified: int = 0  # number of tensors compared with the trainer's


@dataclass(frozen=True, slots=True)
class Loaded:
    """How an engine loaded a version."""

    stall_s: float  # how long the engine was paused
    transport: str
    verified: int = 0  # number of tensors compared with the trainer's
    prepared: Prepared | None = None
