"""The part of mooncake-transfer-engine that agentrl uses, in one process: `mooncake.store` for tests.

Signatures, results and refusals are those of the package's documentation and of version 0.3.13 over TCP.
"""

from __future__ import annotations

import ctypes
import re
import sys
from types import ModuleType

import pytest

SIGNATURES = {
    "setup": "(self, local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices, "
    "master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path='', tenant_id='default', "
    "enable_client_http_server=False, client_http_port=9300)",
    "put": "(self, key, value, config=None)",
    "get_size": "(self, arg0)",
    "get_into": "(self, key, buffer_ptr, size)",
    "register_buffer": "(self, buffer_ptr, size)",
    "unregister_buffer": "(self, buffer_ptr)",
    "remove_by_regex": "(self, regex_pattern, force=False)",
    "close": "(self)",
}
"""The signatures of the methods of MooncakeDistributedStore, without types."""
UNUSABLE, FULL, INVALID, MISSING, UNREACHABLE = -1, -200, -600, -704, -900


class Master:
    """The objects of a store. `room` is the number of bytes that it holds, and it evicts the oldest objects."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.room = 1 << 40
        self.is_up = True
        self.dies_after: int | None = None  # reads
        self.full_answers = 0  # puts that are refused while it evicts
        self.registered: dict[int, int] = {}
        self.clients: list[tuple[str, int]] = []  # address and size of the segment

    def read(self) -> None:
        if self.dies_after is not None:
            self.is_up = self.dies_after > 0
            self.dies_after -= 1


def module(master: Master) -> ModuleType:
    """The module `mooncake.store` whose clients all use `master`."""

    class MooncakeDistributedStore:
        def __init__(self):
            self._buffer_bytes = None

        def setup(
            self,
            local_hostname,
            metadata_server,
            global_segment_size,
            local_buffer_size,
            protocol,
            rdma_devices,
            master_server_addr,
            engine=None,
            enable_ssd_offload=False,
            ssd_offload_path="",
            tenant_id="default",
            enable_client_http_server=False,
            client_http_port=9300,
        ):
            assert protocol in ("tcp", "rdma", "efa")
            assert isinstance(global_segment_size, int)
            assert isinstance(rdma_devices, str)
            if not master.is_up:
                return UNUSABLE
            self._buffer_bytes = local_buffer_size
            master.clients.append((local_hostname, global_segment_size))
            return 0

        def put(self, key, value, config=None):
            if self._buffer_bytes is None or not 0 < len(value) <= self._buffer_bytes:
                return INVALID
            if not master.is_up:
                return UNREACHABLE
            if master.full_answers:
                master.full_answers -= 1
                return FULL
            while master.objects and sum(map(len, master.objects.values())) + len(value) > master.room:
                del master.objects[next(iter(master.objects))]
            if len(value) > master.room:
                return FULL
            master.objects.setdefault(key, bytes(value))
            return 0

        def get_size(self, arg0, /):
            if self._buffer_bytes is None:
                return INVALID
            if not master.is_up:
                return UNREACHABLE
            return len(master.objects[arg0]) if arg0 in master.objects else MISSING

        def get_into(self, key, buffer_ptr, size):
            master.read()
            if not master.is_up:
                return UNREACHABLE
            if key not in master.objects:
                return MISSING
            data = master.objects[key]
            if size < len(data) or master.registered.get(buffer_ptr, 0) < size:
                return INVALID
            ctypes.memmove(buffer_ptr, data, len(data))
            return len(data)

        def register_buffer(self, buffer_ptr, size):
            if self._buffer_bytes is None or buffer_ptr in master.registered:
                return INVALID
            master.registered[buffer_ptr] = size
            return 0

        def unregister_buffer(self, buffer_ptr):
            return 0 if master.registered.pop(buffer_ptr, None) else INVALID

        def remove_by_regex(self, regex_pattern, force=False):
            if not master.is_up:
                return UNREACHABLE
            found = [key for key in master.objects if re.search(regex_pattern, key)]
            for key in found:
                del master.objects[key]
            return len(found)

        def close(self):
            self._buffer_bytes = None
            return 0

    made = ModuleType("mooncake.store")
    made.MooncakeDistributedStore = MooncakeDistributedStore
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> Master:
    """Let `mooncake.store` be this module until the test ends."""
    master = Master()
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module(master))
    return master
