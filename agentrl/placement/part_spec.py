"""What a scheduler must know to place a part of a run, and what a task runner must know to start its processes.

A command's words and values may contain these names in braces; the runner replaces them when it starts the command:

    {python}                       the Python interpreter of the runner
    {rank} {size}                  the process's number in the part, and how many there are
    {address}                      the address of the process's host, for other hosts
    {port:NAME}                    a free port of this process; NAME is one of `ports`
    {leader} {leader_port:NAME}    address and port of rank 0, in a gang
    {proxy}                        URL of the run's proxies: the runner's relay to those that are alive
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.errors import AgentRLError

PROXY = "proxy"
"""Name of the part whose processes are the run's proxies; their port is `http`."""
_NAME = re.compile(r"\{([a-z_]+)(?::([a-z_]+))?\}")


class Need(BaseModel):
    """What one process of a part needs on its host."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: Annotated[int, Field(ge=0)] = 0
    cpus: Annotated[float, Field(ge=0)] = 1
    memory_gb: Annotated[float, Field(ge=0)] = 0


class PartSpec(BaseModel):
    """A part: its command, what each process needs, and how processes are placed, started again and ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}
    """Environment of the command, without secrets."""
    secrets: tuple[str, ...] = ()
    """Names of the secrets that the command gets in its environment."""
    ranks: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Processes of the part."""
    gang: bool = False
    """All processes start together, and again together when one dies."""
    spread: Literal["pack", "spread", "one_per_host"] = "pack"
    """Processes share hosts where they can, avoid each other where they can, or never share a host."""
    need: Need = Need()
    ports: tuple[str, ...] = ()
    """Names of the free ports that each process needs."""
    fenced: bool = False
    """A process whose runner cannot renew its lease ends before the lease does. Else it goes on."""
    ends: bool = False
    """The part is done when a process exits with status 0 and the run is finished. Else it runs until it is stopped."""
    max_restarts: Annotated[int, Field(ge=0)] = 5
    """Deaths in ten minutes before the part is given up."""
    grace_s: Annotated[float, Field(ge=0, le=3600)] = 5.0
    """Seconds from SIGTERM to SIGKILL."""
    folder_token: str | None = None
    """Proves that a host sees the run's folder; null: no proof is asked for."""

    @property
    def uses_proxy(self) -> bool:
        """Whether the command needs the relay to the run's proxies."""
        return any("{proxy}" in text for text in (*self.argv, *self.env.values()))

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        known = {"python", "rank", "size", "address", "proxy"} | {f"port:{name}" for name in self.ports}
        if self.gang:
            known |= {"leader"} | {f"leader_port:{name}" for name in self.ports}
        for text in (*self.argv, *self.env.values()):
            for found in _NAME.finditer(text):
                if found[0][1:-1] not in known:
                    raise ValueError(f"{self.name}: {found[0]} is not known here; known are {', '.join(sorted(known))}")
        return self


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replace the names in braces by `values`. Raises AgentRLError for a name without a value."""

    def value(found: re.Match[str]) -> str:
        name = found[0][1:-1]
        if name not in values:
            raise AgentRLError(f"{text!r}: {found[0]} has no value")
        return values[name]

    return _NAME.sub(value, text)
