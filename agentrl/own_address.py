"""The address at which other hosts reach this one."""

from __future__ import annotations

import os
import socket

ADDRESS = "AGENTRL_ADDRESS"
"""Variable that overrides the address, on hosts with several networks."""


def local_address(towards: str) -> str:
    """The address of the interface that leads to the host `towards`, which may be a name. No packet is sent."""
    if chosen := os.environ.get(ADDRESS):
        return chosen
    found = socket.getaddrinfo(towards or "127.0.0.1", 9, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
