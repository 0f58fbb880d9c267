"""A client of a Mooncake store: bytes by key in the memory of several hosts, moved by RDMA or TCP.

What the package mooncake-transfer-engine does (0.3.13: docs/source/api-reference/python/mooncake-store.md, and the
package itself over TCP):

    setup                returns 0, or another number after about 90 s without a master
    put                  0 also for a key that exists, whose bytes stay; -200 while a full store evicts older objects;
                         -600 for no bytes, and for more than the client's local buffer holds
    get_size, get_into   the object's bytes; -704 for a missing key; another negative number for a failure
    remove_by_regex      the number of removed objects, or a negative number
    a client's segment   is gone with its objects when the client is closed or its process ends

The package is loaded when a client connects. A client may be used by several threads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from agentrl.configs.publish_config import MooncakeAddress
from agentrl.errors import DamagedObject, StorageError
from agentrl.own_address import local_address

MISSING, FULL = -704, -200
LOCAL_BUFFER_BYTES = 64 << 20
"""Memory of a client through which `put` sends values."""
FULL_TRIES = 5
"""Puts into a full store, which evicts meanwhile."""
PAUSE_S = 0.2
NEEDS = "the Mooncake store needs mooncake-transfer-engine (pip install 'agentrl[mooncake]') and its libraries"
Bytes = NDArray[np.uint8]


class MooncakeStore:
    """A connected client. `segment_bytes` of this process's memory become part of the store while it is connected."""

    def __init__(
        self, config: MooncakeAddress, segment_bytes: int = 0, pause: Callable[[float], None] = time.sleep
    ) -> None:
        """Connect. Raises StorageError without the package, the master or the memory."""
        self._name = f"mooncake://{config.master}"
        self._pause = pause
        self._client = _client(self._name)
        code = self._client.setup(
            _address_towards(config.master),
            config.metadata,
            segment_bytes,
            LOCAL_BUFFER_BYTES,
            config.protocol,
            config.devices,
            config.master,
        )
        if code != 0:
            raise StorageError(f"cannot connect to {self}: setup returned {code}")

    def __str__(self) -> str:
        return self._name

    def put(self, key: str, value: bytes | memoryview) -> None:
        """Store `value`, which is not empty; an object of this key stays as it is. Raises StorageError."""
        for attempt in range(FULL_TRIES):
            code = self._client.put(key, value)
            if code != FULL:
                break
            self._pause(PAUSE_S * 2**attempt)
        if code != 0:
            raise StorageError(f"cannot write {self}/{key}: put returned {code}")

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when the store does not have it. Raises StorageError."""
        return self._found(key, "get_size", self._client.get_size(key))

    def read_into(self, key: str, buffer: RegisteredBuffer) -> int | None:
        """Read a whole object to the start of `buffer`; its bytes, or None when the store does not have it.

        Raises StorageError, and DamagedObject for an object that is larger than the buffer.
        """
        size = self.size(key)
        if size is None:
            return None
        if size > buffer.memory.nbytes:
            raise DamagedObject(f"{self}/{key} has {size} bytes; {buffer.memory.nbytes} are the most")
        return self._found(key, "get_into", self._client.get_into(key, buffer.memory.ctypes.data, size))

    def remove(self, prefix: str) -> None:
        """Remove the objects whose keys begin with `prefix`, also while they are read. Raises StorageError."""
        code = self._client.remove_by_regex(f"^{re.escape(prefix)}", True)
        if code < 0:
            raise StorageError(f"cannot remove {self}/{prefix}: remove_by_regex returned {code}")

    def close(self) -> None:
        """Leave the store; this process's segment and its objects are gone then."""
        self._client.close()

    def register(self, memory: Bytes) -> None:
        """Let the store write into `memory`. Raises StorageError."""
        code = self._client.register_buffer(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise StorageError(f"{self} cannot use {memory.nbytes} bytes of memory: register_buffer returned {code}")

    def unregister(self, memory: Bytes) -> None:
        """Undo `register`."""
        self._client.unregister_buffer(memory.ctypes.data)

    def _found(self, key: str, call: str, code: int) -> int | None:
        if code == MISSING:
            return None
        if code < 0:
            raise StorageError(f"cannot read {self}/{key}: {call} returned {code}")
        return code


class RegisteredBuffer:
    """Memory of `size` bytes into which a store reads, while the block runs."""

    def __init__(self, store: MooncakeStore, size: int) -> None:
        self._store = store
        self.memory: Bytes = np.empty(size, np.uint8)

    def __enter__(self) -> RegisteredBuffer:
        self._store.register(self.memory)
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        self._store.unregister(self.memory)
        return False


def _client(name: str) -> Any:
    """An object of the package's client class. Raises StorageError when the package cannot be loaded."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(f"cannot connect to {name}: {NEEDS} ({error})") from error
    return MooncakeDistributedStore()


def _address_towards(master: str) -> str:
    """The address of this host on the network of the master, at which other hosts read its segment."""
    try:
        return local_address(master.rpartition(":")[0])
    except OSError as error:
        raise StorageError(f"cannot connect to mooncake://{master}: {error}") from error
