"""Two evaluations episode by episode: what each task gained or lost, the largest loss first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.domain.schemas import Json


@dataclass(frozen=True, slots=True)
class Change:
    """An episode in the evaluation that is looked at, and the same episode in another one; either may be missing."""

    setting: str
    index: int
    sample: int
    source: str | None
    now: Json | None
    before: Json | None

    @property
    def gain(self) -> float | None:
        """Reward now minus reward before; None if one of them is missing."""
        if self.now is None or self.before is None or None in (self.now["reward"], self.before["reward"]):
            return None
        return float(self.now["reward"] - self.before["reward"])


def of(now: Sequence[Json], before: Sequence[Json]) -> list[Change]:
    """The changes, the largest loss first; episodes that cannot be compared come last."""
    ours, theirs = ({(row["setting"], row["index"], row["sample"]): row for row in rows} for rows in (now, before))
    found = [
        Change(*key, (ours.get(key) or theirs[key])["source"], ours.get(key), theirs.get(key))
        for key in ours.keys() | theirs.keys()
    ]
    return sorted(found, key=lambda one: (one.gain is None, one.gain or 0.0, one.setting, one.index, one.sample))
