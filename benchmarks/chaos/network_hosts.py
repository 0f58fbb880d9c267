"""Hosts that are network namespaces of this machine, joined by a bridge. Needs root, and `ip` of iproute2.

host (namespace, 10.231.77.2 …) ── link, which can be cut ── bridge 10.231.77.1, where this machine's own programs are
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from dataclasses import dataclass

BRIDGE = "agentrl"
SUBNET = "10.231.77"
HERE = f"{SUBNET}.1"
"""The address of this machine's own programs, for programs on the hosts."""


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace. Files and process ids are those of this machine."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The words before a command that runs on the host."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Cut the host off: packets are lost, connections stay open."""
        _ip("link", "set", self.name, "down")

    def join(self) -> None:
        """Undo `cut`."""
        _ip("link", "set", self.name, "up")


class HostNetwork:
    """The bridge, and its hosts."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)
        self._hosts: list[Host] = []
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("address", "add", f"{HERE}/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")

    def add(self) -> Host:
        """Make one more host."""
        number = next(self._numbers)
        host = Host(f"{BRIDGE}{number}", f"{SUBNET}.{number}")
        self._hosts.append(host)
        _ip("netns", "add", host.name)
        _ip("link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", host.name, "master", BRIDGE, "up")
        for words in (["link", "set", "lo", "up"], ["address", "add", f"{host.address}/24", "dev", "eth0"]):
            _ip("-netns", host.name, *words)
        _ip("-netns", host.name, "link", "set", "eth0", "up")
        _ip("-netns", host.name, "route", "add", "default", "via", HERE)  # by it programs find their own address
        return host

    def close(self) -> None:
        """Remove hosts and bridge."""
        for host in self._hosts:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was made in part
                _ip("link", "delete", host.name)
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)
        _ip("link", "delete", BRIDGE)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
