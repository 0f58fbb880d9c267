"""The part of NIXL that agentrl uses, in one process: the package `nixl` for tests.

Signatures, results and refusals are those of src/api/python/_api.py and of version 1.5.1 between processes of a host.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from types import ModuleType

import pytest

REAL = bool(os.environ.get("AGENTRL_TEST_NIXL"))
"""Test with the real package."""
SIGNATURES = {
    "__init__": "(self, agent_name, nixl_conf=None, instantiate_all=False)",
    "register_memory": "(self, reg_list, mem_type=None, backends=[])",
    "get_agent_metadata": "(self)",
    "add_remote_agent": "(self, metadata)",
    "get_xfer_descs": "(self, descs, mem_type=None)",
    "initialize_xfer": "(self, operation, local_descs, remote_descs, remote_agent, notif_msg=b'', backends=[])",
    "transfer": "(self, handle, notif_msg=b'')",
    "check_xfer_state": "(self, handle)",
    "release_xfer_handle": "(self, handle)",
}
"""The signatures of the methods of nixl_agent, without types."""
CONFIG_SIGNATURE = (
    "(self, enable_prog_thread=True, enable_listen_thread=False, listen_port=8888, capture_telemetry=False, "
    "num_threads=0, backends=['UCX'], sync_mode=None)"
)


class Network:
    """The agents of a test, by their metadata."""

    def __init__(self) -> None:
        self.agents: dict[bytes, dict[int, int]] = {}  # the registered memory: address → bytes
        self.reads = 0
        self.dies_after: int | None = None  # reads
        self.hangs = False
        self.cannot_start = False
        self.no_memory = False
        self.unreleased = 0  # releases that fail


def module(network: Network) -> ModuleType:
    """The package `nixl` whose agents are all in `network`."""
    made = ModuleType("nixl")
    failures = {
        name: type(name, (Exception,), {})
        for name in ("nixlBackendError", "nixlMismatchError", "nixlNotFoundError", "nixlRemoteDisconnectError")
    }
    vars(made).update(failures)

    class nixl_thread_sync_t(enum.Enum):
        NIXL_THREAD_SYNC_NONE = 0
        NIXL_THREAD_SYNC_STRICT = 1

    class nixl_agent_config:
        def __init__(
            self,
            enable_prog_thread=True,
            enable_listen_thread=False,
            listen_port=8888,
            capture_telemetry=False,
            num_threads=0,
            backends=["UCX"],  # noqa: B006
            sync_mode=None,
        ):
            assert sync_mode is None or isinstance(sync_mode, nixl_thread_sync_t)
            self.backends = backends

    class Handle:
        def __init__(self, copy):
            self.copy = copy
            self.state = "PROC"

    class nixl_agent:
        def __init__(self, agent_name, nixl_conf=None, instantiate_all=False):
            if network.cannot_start:
                raise RuntimeError("No plugins available for NIXL, cannot start transfers!")
            self.name = agent_name
            self._metadata = f"metadata of {agent_name}".encode()
            self._memory = network.agents[self._metadata] = {}
            self._known = set()

        def register_memory(self, reg_list, mem_type=None, backends=[]):  # noqa: B006
            assert mem_type == "DRAM"
            if network.no_memory:
                raise failures["nixlBackendError"]("NIXL_ERR_BACKEND")
            for address, size, device, info in reg_list:
                assert (device, info) == (0, "")
                self._memory[address] = size
            return reg_list

        def get_agent_metadata(self):
            return self._metadata

        def add_remote_agent(self, metadata):
            if metadata not in network.agents:
                raise failures["nixlMismatchError"]("NIXL_ERR_MISMATCH")
            name = metadata.removeprefix(b"metadata of ")
            self._known.add(name)
            return name  # bytes, as the package does, although its documentation says str

        def get_xfer_descs(self, descs, mem_type=None):
            assert mem_type == "DRAM"
            assert all(len(one) == 3 for one in descs)
            return tuple(descs)

        def initialize_xfer(
            self,
            operation,
            local_descs,
            remote_descs,
            remote_agent,
            notif_msg=b"",
            backends=[],  # noqa: B006
        ):
            assert operation == "READ"
            if remote_agent not in self._known:
                raise failures["nixlNotFoundError"]("NIXL_ERR_NOT_FOUND")
            theirs = network.agents[b"metadata of " + remote_agent]
            ((to, size, _),), ((source, wanted, _),) = local_descs, remote_descs
            if size != wanted or not (has(self._memory, to, size) and has(theirs, source, size)):
                raise failures["nixlNotFoundError"]("NIXL_ERR_NOT_FOUND")
            return Handle((to, source, size))

        def transfer(self, handle, notif_msg=b""):
            if network.dies_after is not None and network.reads >= network.dies_after:
                raise failures["nixlRemoteDisconnectError"]("NIXL_ERR_REMOTE_DISCONNECT")
            network.reads += 1
            return "PROC"

        def check_xfer_state(self, handle):
            if not network.hangs:
                ctypes.memmove(*handle.copy)
                handle.state = "DONE"
            return handle.state

        def release_xfer_handle(self, handle):
            if handle.state == "PROC" and network.unreleased:
                network.unreleased -= 1
                raise failures["nixlBackendError"]("NIXL_ERR_BACKEND")

    vars(made).update(nixl_agent=nixl_agent, nixl_agent_config=nixl_agent_config, nixl_thread_sync_t=nixl_thread_sync_t)
    return made


def has(memory: dict[int, int], address: int, size: int) -> bool:
    """Whether memory is registered from an address on."""
    return any(start <= address and address + size <= start + length for start, length in memory.items())


def install(monkeypatch: pytest.MonkeyPatch) -> Network:
    """Let `nixl` be this module until the test ends, unless the real one is tested."""
    network = Network()
    if not REAL:
        monkeypatch.setitem(sys.modules, "nixl", module(network))
    return network
