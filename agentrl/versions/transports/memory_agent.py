"""An agent of NIXL: lets other hosts read this host's memory, and reads theirs, by RDMA where the network has it.

What the package nixl does (1.5.1: src/api/python/_api.py, and the package itself over shared memory and TCP):

    get_agent_metadata   describes the agent and the memory that it has registered until then
    add_remote_agent     returns the other agent's name, as bytes; refuses invalid metadata
    initialize_xfer      a READ of descriptors (address, bytes, device) of the other agent into ours
    transfer, check_xfer_state   "DONE", "PROC" while it runs, or "ERR"
    release_xfer_handle  cancels a transfer that runs, or raises when it cannot: its memory may still be written
    failures             exceptions of the package, each of them a direct subclass of Exception

The package is loaded when an agent is made; it imports torch.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import StorageError

NEEDS = "reading a host's memory needs NIXL (pip install 'agentrl[nixl]')"
POLL_S = 0.0005
MEMORY, BACKEND = "DRAM", "UCX"
Bytes = NDArray[np.uint8]


class MemoryAgent:
    """One agent of this process. Several threads may use it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Make an agent. Raises StorageError without the package or a network that it can use."""
        self._nixl = _package()
        self._clock = clock
        self._sleep = sleep
        self._peers: dict[bytes, Any] = {}
        self._registered: list[Bytes] = []
        self._unreleased: list[tuple[Any, Bytes]] = []
        """Transfers that could not be cancelled: their memory must not be freed."""
        self._adding = threading.Lock()
        self._failures = tuple(found for found in vars(self._nixl).values() if _is_failure(found))
        try:
            strict = self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = self._nixl.nixl_agent_config(backends=[BACKEND], sync_mode=strict)
            self._agent = self._nixl.nixl_agent(f"agentrl-{uuid.uuid4().hex}", config)
        except (RuntimeError, *self._failures) as error:
            raise StorageError(f"NIXL cannot start: {error}") from error

    def register(self, memory: Bytes) -> None:
        """Let this agent read into `memory`, and others read it. Raises StorageError."""
        try:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], MEMORY)
        except self._failures as error:
            raise StorageError(f"NIXL cannot use {memory.nbytes} bytes of memory: {error}") from error
        self._registered.append(memory)

    def metadata(self) -> bytes:
        """What another agent needs to read this one's memory."""
        made: bytes = self._agent.get_agent_metadata()
        return made

    def read(self, peer: bytes, address: int, target: Bytes, until: float) -> None:
        """Read `target.nbytes` bytes at an address of the agent with the metadata `peer`, into registered memory.

        Raises StorageError, also when it is not done at the time `until` of the clock.
        """
        try:
            local = self._agent.get_xfer_descs([(target.ctypes.data, target.nbytes, 0)], MEMORY)
            remote = self._agent.get_xfer_descs([(address, target.nbytes, 0)], MEMORY)
            handle = self._agent.initialize_xfer("READ", local, remote, self._peer(peer))
            try:
                state = self._finished(handle, until)
            finally:
                self._release(handle, target)
        except self._failures as error:
            with self._adding:
                self._peers.pop(peer, None)
            raise StorageError(f"NIXL cannot read: {error}") from error
        if state != "DONE":
            raise StorageError(f"NIXL cannot read: {'it took too long' if state == 'PROC' else state}")

    def _finished(self, handle: Any, until: float) -> str:
        """Run a transfer; its state when it has ended, or "PROC" at the time `until`."""
        state: str = self._agent.transfer(handle)
        while state == "PROC" and self._clock() < until:
            self._sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        return state

    def _release(self, handle: Any, target: Bytes) -> None:
        try:
            self._agent.release_xfer_handle(handle)
        except self._failures:
            self._unreleased.append((handle, target))

    def _peer(self, metadata: bytes) -> Any:
        """The name of another agent, as this package wants it."""
        with self._adding:
            if metadata not in self._peers:
                self._peers[metadata] = self._agent.add_remote_agent(metadata)
            return self._peers[metadata]


def _package() -> Any:
    try:
        import nixl
    except ImportError as error:
        raise StorageError(f"{NEEDS} ({error})") from error
    return nixl


def _is_failure(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Exception) and found.__name__.startswith("nixl")
