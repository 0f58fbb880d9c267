"""What agentrl does not do with vLLM: tensors, prepared versions, memory release. Versions are loaded from their folder
while the server is paused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from agentrl.domain.schemas import Json
from agentrl.engine.control.preparation import Order, Preparation
from agentrl.errors import CannotPrepare, EngineRejected, NotPrepared


class OnlyFolders:
    """Refuses the rest of `EngineClient`."""

    url: str

    async def release_memory(self, *, cache: bool = True) -> None:
        """Refused."""
        self._refuse("release its memory")

    async def resume_weights(self) -> None:
        """Refused."""
        self._refuse("release its memory")

    async def resume_cache(self) -> None:
        """Refused."""
        self._refuse("release its memory")

    async def tensor_ranks(self) -> int:
        """Refused, so that no publish sends tensors."""
        self._refuse("take tensors")

    async def join_group(
        self, group: str, *, host: str, port: int, rank: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def leave_group(self, group: str, timeout_s: float | None = None) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def begin_update(self) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def end_update(self, timeout_s: float | None = None) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def receive_tensors(
        self, group: str, bucket: Json, *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def take_tensors(
        self, payloads: Sequence[str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def take_handles(
        self, handles: Mapping[str, str], *, version: int | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Refused."""
        self._refuse("take tensors")

    async def prepare(self, order: Order, timeout_s: float = 0.0) -> Preparation:
        """Refused."""
        raise CannotPrepare(f"{self.url} prepares no versions: vLLM loads them while it is paused")

    async def preparation(self, timeout_s: float = 0.0) -> Preparation | None:
        """None: the server prepares no versions."""
        return None

    async def prepared_digests(self, name: str, timeout_s: float = 0.0) -> list[dict[str, str]]:
        """Refused."""
        raise NotPrepared(f"{self.url} has not prepared {name}")

    def version_source(self, name: str, until: int) -> Json | None:
        """None: other hosts read no versions from the server."""
        return None

    async def swap(self, name: str, version: int, *, flush_cache: bool = True, timeout_s: float | None = None) -> float:
        """Refused."""
        raise NotPrepared(f"{self.url} has not prepared {name}")

    def _refuse(self, what: str) -> NoReturn:
        raise EngineRejected(f"{self.url} cannot {what}: agentrl does not offer that for vLLM")
