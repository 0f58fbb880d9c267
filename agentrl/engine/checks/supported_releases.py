"""Which releases of a server agentrl supports, and how a server is started so that it can do more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.engine.engine_client import Capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """What agentrl knows of a backend's servers."""

    title: str  # as its makers spell it
    oldest: str  # release that is supported
    tested: str  # newest release that the contract was run with
    start: str  # how a server is started that can be sampled from
    label: str  # what to do about a server that reports no version
    temperature: str  # how it is started so that its logprobs are of the temperature-scaled distribution
    options: Mapping[Capability, str]  # how it is started with a capability; none: it cannot have it

    @property
    def releases(self) -> str:
        """The supported releases, in words."""
        return f"{self.oldest} or later, tested with {self.tested}"

    def is_too_old(self, release: str) -> bool:
        """Whether a release is older than the oldest supported one."""
        return numbers(release) < numbers(self.oldest)

    def is_untested(self, release: str) -> bool:
        """Whether a release is newer than the newest tested one."""
        return numbers(release) > numbers(self.tested)


def numbers(release: str) -> tuple[int, ...]:
    """The numbers of a release, for comparison: `0.5.23.post1` → (0, 5, 23)."""
    found = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
