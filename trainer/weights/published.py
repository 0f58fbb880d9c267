"""The trainer's facts about a version that it has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Published:
    """A version's absolute folder, its checksum, and what publishing it needs."""

    path: Path = Path()
    checksum: str = ""
    size_bytes: int = 0  # of its tensors; 0 where engines can only read the folder
    digests: Mapping[str, str] = field(default_factory=dict)  # of tensors, by the engines' names
    written_bytes: int = 0  # of the files of tensors and of the delta
    density: float | None = None  # share of elements that differ from the version before; None: not compared
    parent: str | None = None  # the version that its delta is from
    whole: bool = True  # has files with all tensors

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step that made the version."""
        found = {
            "publish/bytes": float(self.written_bytes),
            "publish/whole": float(self.whole),
        }
        return found if self.density is None else found | {"publish/density": self.density}
