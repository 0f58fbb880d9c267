"""When the steps of a generated run happen, which version is served at a time, and ids that sort by time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from agentrl.store.db import codec

TRAINED, PUBLISHED, NOW = 0.8, 0.9, 0.4
"""Share of a step's time after which it is trained and published; share of the step after the last that has passed."""
MAX_STALENESS = 4
EPOCH = 1


@dataclass(frozen=True, slots=True)
class Timeline:
    """Step s begins s steps after the start, and makes version s; one further step has begun and is not trained."""

    start: float
    step_s: float
    steps: int  # that are published

    @classmethod
    def until(cls, now: float, steps: int, step_s: float) -> Timeline:
        """The timeline of a run that goes on at `now`."""
        return cls(now - (steps + 1 + NOW) * step_s, step_s, steps)

    @property
    def now(self) -> float:
        """The time at which the run is looked at."""
        return self.at(self.steps + 1 + NOW)

    def at(self, steps: float) -> float:
        """The time so many steps after the start."""
        return self.start + steps * self.step_s

    def version_at(self, seconds: float) -> int:
        """The version that engines serve at a time."""
        return max(0, min(self.steps, int((seconds - self.start) / self.step_s - PUBLISHED)))


class Ids:
    """Ids of rows that were made at given times."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0

    def at(self, seconds: float) -> str:
        """A new id that sorts after those of earlier times."""
        self._count = (self._count + 1) & 0xFFFF
        stamp = int(codec.first_id(seconds), 16) + self._count
        return f"{stamp:016x}{self._random.getrandbits(64):016x}"

    def digest(self) -> str:
        """64 random hex digits."""
        return f"{self._random.getrandbits(256):064x}"
