"""Decides which rank owns which tensors of a version, and in which order and in which pieces a rank gets them.

    parameters ─► units (converted together) ─► owners (by bytes) ─► buckets of pieces ─► files of a share

All functions are pure, and every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], dict[str, Tensor]]
"""Makes tensors of files, by name, from whole parameters on the CPU."""


class Output(NamedTuple):
    """A tensor of a version: its name in files, its type and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are converted together, and the tensors that they make.

    Without `convert` the only output is the only parameter, whose rows may be handled piece by piece. `gathered` is the
    type in which parameters travel. Units of one `family` have one owner, which gets them one after another.
    """

    parameters: tuple[str, ...]
    outputs: tuple[Output, ...]
    gathered: torch.dtype
    family: str
    convert: Convert | None = field(default=None, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the outputs."""
        return sum(output.nbytes for output in self.outputs)


class Piece(NamedTuple):
    """Rows `start` to `stop` of a unit's only output; the whole unit where `stop` is None."""

    unit: Unit
    start: int = 0
    stop: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        if self.stop is None:
            return self.unit.nbytes
        (output,) = self.unit.outputs
        return self.unit.nbytes // output.shape[0] * (self.stop - self.start)


def shares(units: Sequence[Unit], owners: Sequence[int]) -> dict[int, list[Unit]]:
    """Owner → its units. Families go to the owner with the fewest bytes, the largest family first.

    Within a share, wide types come first, so that every tensor is aligned in a file.
    """
    families: dict[str, list[Unit]] = {}
    for unit in units:
        families.setdefault(unit.family, []).append(unit)
    sizes = {family: sum(unit.nbytes for unit in members) for family, members in families.items()}
    loads = dict.fromkeys(owners, 0)
    found: dict[int, list[list[Unit]]] = {owner: [] for owner in owners}
    for family in sorted(families, key=lambda family: -sizes[family]):
        owner = min(owners, key=lambda owner: loads[owner])
        loads[owner] += sizes[family]
        found[owner].append(families[family])
    order = {family: place for place, family in enumerate(families)}

    def rank(members: list[Unit]) -> tuple[int, int]:
        return -members[0].outputs[0].dtype.itemsize, order[members[0].family]

    return {owner: [unit for members in sorted(own, key=rank) for unit in members] for owner, own in found.items()}


def buckets(units: Sequence[Unit], size: int, *, by_rows: bool) -> list[list[Piece]]:
    """The units in order, in buckets of at most `size` bytes.

    A larger tensor is cut by its rows, where `by_rows` and no conversion needs all of them; otherwise it has a bucket
    of its own.
    """
    found: list[list[Piece]] = []
    room = 0
    for unit in units:
        for piece in _pieces(unit, size) if by_rows else [Piece(unit)]:
            if not found or piece.nbytes > room:
                found.append([])
                room = size
            found[-1].append(piece)
            room -= piece.nbytes
    return found


def _pieces(unit: Unit, size: int) -> Iterator[Piece]:
    shape = unit.outputs[0].shape
    if unit.convert is not None or unit.nbytes <= size or not shape:
        yield Piece(unit)
        return
    rows = max(1, size * shape[0] // unit.nbytes)
    for start in range(0, shape[0], rows):
        yield Piece(unit, start, min(start + rows, shape[0]))
