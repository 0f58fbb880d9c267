"""The ports at which other hosts of a run reach this one, and the interface of an address."""

from __future__ import annotations

import os

import psutil

from agentrl.engine.server_process import free_port
from agentrl.errors import UserError

PORT = "AGENTRL_PORT_"
"""With a port's name in capitals behind it: variable with a fixed port, where each process has a network of its own."""


def local_port(name: str) -> int:
    """The fixed port of this name, else a free one. Raises UserError for a variable that holds no port."""
    if not (fixed := os.environ.get(PORT + name.upper())):
        return free_port("0.0.0.0")
    if not fixed.isdecimal() or not 0 < int(fixed) < 65536:
        raise UserError(f"{PORT}{name.upper()}: {fixed!r} is not a port from 1 to 65535")
    return int(fixed)


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None when no interface has it."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)
