"""How a weight version reaches an engine, and what the pool records about engines in the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from agentrl.errors import EngineError
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.tensor_transfer import Transfer


class EngineBusy(EngineError):
    """The engine is paused, and another replica, or its operator, has to continue it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How a version reaches the engines: by a transfer, else from its folder."""

    transfer: Transfer | None = None
    digests: dict[str, str] = field(default_factory=dict)  # of its tensors, by the names that engines use
    n_bytes: int | None = None


BY_FOLDER = Delivery()


@dataclass(frozen=True, slots=True)
class Loaded:
    """How an engine loaded a version."""

    stall_s: float  # how long the engine was paused
    transport: str
    verified: int = 0  # number of tensors compared with the trainer's


class Records(Protocol):
    """The store as the pool and the updates use it. Every method may raise StoreError."""

    async def wanted(self, reported: int | None) -> int:
        """The version that an engine which reports `reported` should serve."""

    async def folder(self, version: int) -> str | None:
        """The folder with a version's tensors. None: engines keep the weights that they have."""

    async def save(self, engine: Engine) -> None:
        """Record an engine's state."""

    async def take(self, url: str, seconds: float) -> str | None:
        """Take the turn to change an engine's weights for `seconds`; returns None, or the replica that has the turn."""

    async def give_back(self, url: str, *, whole: bool) -> None:
        """End the turn. Other replicas may take it; if the weights are not `whole`, the next one repairs them."""

    async def is_whole(self, url: str) -> bool:
        """Whether no replica is changing the engine's weights or has left them incomplete."""

    async def drained(self) -> set[str]:
        """The engines that get no new calls."""

    async def undone(self, version: int) -> bool:
        """Whether a version newer than this one was rolled back."""
