"""Streams a version's tensors from the ranks' parameters to their owners, bucket by bucket. No rank holds the model.

An owner has at once the bucket that it gets and the message that it comes in. Who stores a bucket while the next one is
gathered holds one more, so buckets are half of `publish.bucket_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.trainer.distributed import World
from agentrl.trainer.weights.gathering import Placement, Wanted, gather
from agentrl.trainer.weights.ownership import Output, Piece, Unit, buckets, shares
from agentrl.trainer.weights.tensor_file_layout import TensorFile, tensor_files


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

    @cached_property
    def shares(self) -> dict[int, list[Unit]]:
        """Owner → its units, in order."""
        return shares(self.units, self.owners)

    def files(self, rank: int) -> list[TensorFile]:
        """The safetensors files of a rank's share."""
        outputs = {owner: [o for unit in own for o in unit.outputs] for owner, own in self.shares.items()}
        return dict(zip(outputs, tensor_files(list(outputs.values())), strict=True)).get(rank, [])

    def buckets(self, *, by_rows: bool = True) -> dict[int, list[list[Piece]]]:
        """Owner → its buckets. With `by_rows`, a tensor larger than a bucket is cut."""
        size = max(1, self.bucket_bytes // 2)
        return {owner: buckets(own, size, by_rows=by_rows) for owner, own in self.shares.items()}

    def chunks(self, *, by_rows: bool = True) -> Iterator[list[Chunk]]:
        """This rank's buckets; empty ones while only others get some. Collective: every rank takes every bucket."""
        found = self.buckets(by_rows=by_rows)
        for number in range(max(map(len, found.values()), default=0)):
            yield self._bucket({owner: own[number] for owner, own in found.items() if number < len(own)})

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
    """The chunks of a unit's gathered parameters."""
    unit = piece.unit
    if unit.convert is None:
        (output,), (data,) = unit.outputs, whole
        return [Chunk(output, output.nbytes // max(1, output.shape[0]) * piece.start if output.shape else 0, data)]
    made = unit.convert(whole)
    return [Chunk(output, 0, made[output.name].to(output.dtype).contiguous()) for output in unit.outputs]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
