"""Puts the weights of a version into a paused engine: swapped in, received, or read from a folder."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from agentrl.engine.engine_client import EngineClient, Memory
from agentrl.errors import EngineError, EngineRejected, EngineUnavailable
from agentrl.proxy.engines.engine_state import Engine
from agentrl.proxy.engines.tensor_transfer import close_open_update, verify
from agentrl.proxy.engines.version_delivery import Delivery, Prepared

log = logging.getLogger(__name__)
PREPARED = "prepared"
"""The transport of a version that was swapped in."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Changes the weights of paused engines, which this replica has claimed."""

    base_for: Callable[[int], Awaitable[str | None]]
    """The folder that an engine without weights loads before a version."""
    timeout_s: float

    async def swap(self, engine: Engine, version: int, prepared: Prepared, *, flush: bool) -> bool:
        """Make the prepared version the one in use; false when the engine must load it instead, in the same pause.

        Raises EngineUnavailable.
        """
        try:
            await engine.client.swap(prepared.name, version, flush_cache=flush, timeout_s=self.timeout_s)
            await _check_label(engine.client, version)
        except EngineUnavailable:
            raise
        except EngineError as error:
            log.warning("engine %s reads version %d from its folder: %s", engine.url, version, error)
            return False
        return True

    async def reload(self, engine: Engine, version: int, path: str | None, delivery: Delivery) -> tuple[str, int]:
        """Load all weights into an engine that has released its memory, and let it have its memory again.

        It reports `version` only after that, so that a replica that finds it without weights or cache knows it.
        Returns and raises as `load` does.
        """
        client = engine.client
        if path is None:
            raise EngineError(f"{engine.url} has released its weights, and no folder has version {version}")
        base = await self.base_for(version)
        if engine.is_released:
            await client.resume_weights()
            engine.memory = Memory.RELOADING
        if base is not None:
            await client.update_weights_from_disk(base, None, timeout_s=self.timeout_s)
        loaded = await self.load(client, None, path, delivery, flush=True)
        await client.resume_cache()
        await client.label_weights(version)
        engine.memory = Memory.HELD
        await _check_label(client, version)
        return loaded

    async def load(
        self, client: EngineClient, version: int | None, path: str | None, delivery: Delivery, *, flush: bool
    ) -> tuple[str, int]:
        """Load weights: by the delivery's transfer if possible, else from the folder.

        The engine then reports `version`; None keeps its label. Returns the transport, and how many tensors were
        compared with the trainer's. Engines refuse to `flush` the cache while requests occupy it. Raises EngineError.
        """
        transfer = delivery.transfer
        if transfer is not None and transfer.reaches(client.url):
            try:
                await transfer.load(client, version, flush_cache=flush)
                return transfer.transport, await _check(client, version, delivery)
            except EngineError as error:
                log.warning("engine %s reads the version from its folder: %s", client.url, error)
                await close_open_update(client)
        if path is not None:
            await self._load_folder(client, path, version, delivery, flush=flush)
        elif version is not None:
            await client.label_weights(version)
        return "none" if path is None else "disk", await _check(client, version, delivery)

    async def _load_folder(
        self, client: EngineClient, path: str, version: int | None, delivery: Delivery, *, flush: bool
    ) -> None:
        """Let an engine read a folder. Raises EngineError, which says what to set if it was made on this host."""
        try:
            await client.update_weights_from_disk(path, version, flush_cache=flush, timeout_s=self.timeout_s)
        except EngineRejected as error:
            if delivery.folder is None or path == delivery.folder.path:
                raise
            said = f"{error}. {path} was made from a delta on the proxy's host: set publish.delta: never"
            raise EngineRejected(said, engine_message=error.engine_message) from error


async def _check(client: EngineClient, version: int | None, delivery: Delivery) -> int:
    """Check the version that an engine reports, and its tensors; returns how many were compared. Raises EngineError."""
    if version is not None:
        await _check_label(client, version)
    return await verify(client, delivery.digests)


async def _check_label(client: EngineClient, version: int) -> None:
    reported = (await client.model_info()).version
    if reported != str(version):
        raise EngineError(f"{client.url} reports version {reported!r} after an update to {version}")
