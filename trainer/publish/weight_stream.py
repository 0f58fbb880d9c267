"""Streams a version's tensors from the ranks' parameters to their owners, bucket by bucket. No rank holds the model.

An owner has at once the bucket that it gets and the message that it comes in. Who stores a bucket while the next one is
gathered holds one more, so buckets are half of `publish.bucket_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.distributed import World
from agentrl.trainer.publish.gathering import Placement, Wanted, gather
from agentrl.trainer.publish.ownership import Output, Piece, Unit, buckets, shares


class Chunk(NamedTuple):
    """Contiguous bytes of an output on the CPU, `start` bytes from its beginning."""

    output: Output
    start: int
    data: Tensor


@dataclass(frozen=True)
class Stream:
    """A version's tensors on their way to the ranks in `owners`."""

    units: Sequence[Unit]
    parameters: Mapping[str, Tensor]
    placed: Placement
    world: World
    owners: Sequence[int]
    bucket_bytes: int

    def share(self, rank: int) -> list[Unit]:
        """What a rank gets, in order."""
        return shares(self.units, self.owners).get(rank, [])

    def chunks(self, *, by_rows: bool = True) -> Iterator[list[Chunk]]:
        """This rank's buckets; empty ones while only others get some. Collective: every rank takes every bucket.

        With `by_rows`, a tensor larger than a bucket comes in several chunks.
        """
        size = max(1, self.bucket_bytes // 2)
        found = {owner: buckets(own, size, by_rows=by_rows) for owner, own in self.plan.items()}
        for number in range(max(map(len, found.values()))):
            wanted = {owner: own[number] for owner, own in found.items() if number < len(own)}
            yield self._bucket(wanted)

    @property
    def plan(self) -> dict[int, list[Unit]]:
        """Owner → its units, in order."""
        return shares(self.units, self.owners)

    def _bucket(self, pieces: Mapping[int, Sequence[Piece]]) -> list[Chunk]:
        wanted = {owner: [w for piece in own for w in self._wanted(piece)] for owner, own in pieces.items()}
        gathered = iter(gather(wanted, self.parameters, self.placed, self.world))
        found: list[Chunk] = []
        for piece in pieces.get(self.world.rank, ()):
            whole = [next(gathered) for _ in piece.unit.parameters]
            found += _chunks(piece, whole)
        return found

    def _wanted(self, piece: Piece) -> list[Wanted]:
        made = []
        for name in piece.unit.parameters:
            shape = tuple(self.parameters[name].shape)
            rows = shape[0] if shape else 1
            stop = rows if piece.stop is None else piece.stop
            made.append(Wanted(name, shape, piece.start, stop, piece.unit.gathered))
        return made


def _chunks(piece: Piece, whole: Sequence[Tensor]) -> list[Chunk]:
    """What a unit's gathered parameters make."""
    unit = piece.unit
    if unit.convert is None:
        (output,), (data,) = unit.outputs, whole
        return [Chunk(output, output.nbytes // max(1, output.shape[0]) * piece.start if output.shape else 0, data)]
    made = unit.convert(whole)
    return [Chunk(output, 0, made[output.name].to(output.dtype).contiguous()) for output in unit.outputs]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
