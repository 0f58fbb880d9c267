"""Brings pieces of sharded parameters to the ranks that own them: one exchange per round, a bucket for each owner.

Every rank knows where every rank's part of a parameter lies in the whole (`Placement`), so any placement is gathered in
one way: sharded over one dimension or several, replicated, or divided by experts. A rank sends an owner only what that
lacks, in the type of the version, and no other rank gets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.trainer.distributed import World
from agentrl.trainer.models.rank_parts import owned

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop for each dimension."""
Placement = Mapping[str, Sequence[tuple[Box, Sequence[int]]]]
"""Parameter → its parts, which make it up together, and the ranks that hold each."""
ALIGNMENT = 16
"""Bytes to which parts in a message are aligned."""


class Wanted(NamedTuple):
    """Rows `start` to `stop` of a parameter of this shape, in a type."""

    parameter: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: torch.dtype

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        return (self.stop - self.start, *self.shape[1:]) if self.shape else ()


class _Part(NamedTuple):
    """What one rank has of a wanted piece: a box of the parameter."""

    place: int  # of the piece in its owner's list
    wanted: Wanted
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.wanted.dtype.itemsize

    @property
    def room(self) -> int:
        """Its bytes in a message."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Round:
    """One rank's view of an exchange."""

    kept: list[_Part]  # what it wants and has
    sends: list[list[_Part]]  # by destination
    receives: list[list[_Part]]  # by source


def placement(parameters: Mapping[str, Tensor], world: World) -> Placement:
    """Where the ranks' parts of the parameters lie. Collective."""
    own = {name: tuple((s.start, s.stop) for s in owned(tensor)[1]) for name, tensor in parameters.items()}
    everyones = world.everyones(own)
    found: dict[str, list[tuple[Box, list[int]]]] = {}
    for name, tensor in parameters.items():
        holders: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(everyones):
            if _volume(boxes[name]):
                holders.setdefault(boxes[name], []).append(rank)
        assert sum(map(_volume, holders)) == tensor.numel(), f"the ranks' parts of {name} overlap or leave gaps"
        found[name] = list(holders.items())
    return found


@torch.no_grad()
def gather(
    wanted: Mapping[int, Sequence[Wanted]], parameters: Mapping[str, Tensor], placed: Placement, world: World
) -> list[Tensor]:
    """The pieces that this rank wants, on the CPU; `wanted` has those of every owner. Collective.

    A piece that this rank has already, in the wanted type, is a view of the parameter.
    """
    plan, own = _planned(wanted, placed, world), wanted.get(world.rank, ())
    views = {part.place: view for part in plan.kept if (view := _view(part, parameters)) is not None}
    pieces = [views[i] if i in views else torch.empty(w.piece_shape, dtype=w.dtype) for i, w in enumerate(own)]
    for part in plan.kept:
        if part.place not in views:
            _within(pieces[part.place], part).copy_(_local(part, parameters))
    if world.size > 1:
        for part, received in _exchanged(plan, parameters):
            _within(pieces[part.place], part).copy_(received)
    return pieces


def _exchanged(plan: _Round, parameters: Mapping[str, Tensor]) -> Iterator[tuple[_Part, Tensor]]:
    """What this rank receives. Sends what the others receive."""
    device = owned(next(iter(parameters.values())))[0].device
    outgoing = torch.empty(sum(_lengths(plan.sends)), dtype=torch.uint8, device=device)
    for part, slot in _slots(outgoing, plan.sends):
        slot.copy_(_local(part, parameters))
    incoming = torch.empty(sum(_lengths(plan.receives)), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, _lengths(plan.receives), _lengths(plan.sends))
    del outgoing
    yield from _slots(incoming.cpu(), plan.receives)


def _planned(wanted: Mapping[int, Sequence[Wanted]], placed: Placement, world: World) -> _Round:
    plan = _Round([], [[] for _ in range(world.size)], [[] for _ in range(world.size)])
    for owner, pieces in wanted.items():
        for place, piece in enumerate(pieces):
            for box, ranks in placed[piece.parameter]:
                part = _Part(place, piece, _cut(box, piece))
                source = min(ranks, key=lambda rank: (abs(rank - owner), rank))
                if not part.nbytes or world.rank not in (source, owner):
                    continue
                if source == owner:
                    plan.kept.append(part)
                elif owner == world.rank:
                    plan.receives[source].append(part)
                else:
                    plan.sends[owner].append(part)
    return plan


def _cut(box: Box, piece: Wanted) -> Box:
    """The part of a box that is in the wanted rows."""
    if not box:
        return box
    (start, stop), *others = box
    start, stop = max(start, piece.start), min(stop, piece.stop)
    return ((start, max(start, stop)), *others)


def _local(part: _Part, parameters: Mapping[str, Tensor]) -> Tensor:
    """A box of this rank's part of a parameter."""
    local, region = owned(parameters[part.wanted.parameter])
    inner = tuple(slice(a - own.start, b - own.start) for (a, b), own in zip(part.box, region, strict=True))
    return local.detach()[inner]


def _view(part: _Part, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The wanted piece, where this rank has all of it in its type and on the CPU."""
    local = _local(part, parameters)
    fits = part.shape == part.wanted.piece_shape and local.dtype == part.wanted.dtype
    return local if fits and local.device.type == "cpu" and local.is_contiguous() else None


def _within(piece: Tensor, part: _Part) -> Tensor:
    """Where a part lies in its piece."""
    if not part.box:
        return piece
    (start, stop), *others = part.box
    first = part.wanted.start
    return piece[(slice(start - first, stop - first), *(slice(a, b) for a, b in others))]


def _slots(message: Tensor, parts: Sequence[Sequence[_Part]]) -> Iterator[tuple[_Part, Tensor]]:
    """The places of parts in a message, as tensors of their type and shape."""
    start = 0
    for part in (part for of_rank in parts for part in of_rank):
        yield part, message[start : start + part.nbytes].view(part.wanted.dtype).view(part.shape)
        start += part.room


def _lengths(parts: Sequence[Sequence[_Part]]) -> list[int]:
    """Bytes of the message of each rank."""
    return [sum(part.room for part in of_rank) for of_rank in parts]


def _volume(box: Box) -> int:
    return prod(stop - start for start, stop in box)
