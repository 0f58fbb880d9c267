"""What the trainer knows about a version that it has written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Published:
    """A version's absolute folder, its checksum, and what publishing it needs. Empty on ranks other than 0."""

    path: Path = Path()
    checksum: str = ""
    size_bytes: int = 0  # of its tensors; 0 where engines can only read the folder
    digests: Mapping[str, str] = field(default_factory=dict)  # of tensors, by the engines' names
    written_bytes: int = 0  # of the files of tensors, or of the delta's where there are no whole ones
    density: float = 1.0  # share of elements that differ from the parent's; 1 without a parent
    parent: str | None = None  # the version that its delta is from
    whole: bool = True  # has files with all tensors

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step that made the version."""
        return {
            "publish/bytes": float(self.written_bytes),
            "publish/density": self.density,
            "publish/whole": float(self.whole),
        }
