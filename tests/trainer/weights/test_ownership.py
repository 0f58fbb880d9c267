"""Who owns which tensors, and in what pieces they come."""

from __future__ import annotations

from itertools import groupby

import hypothesis.strategies as st
import torch
from hypothesis import given

from agentrl.trainer.weights.ownership import Output, Unit, buckets, shares

SIZES = st.lists(st.integers(0, 50), max_size=30)


def units(sizes: list[int], family: int = 1, dtype: torch.dtype = torch.float32) -> list[Unit]:
    """Matrices of two columns; `family` of them have one owner."""
    return [
        Unit((f"p{i}",), (Output(f"t{i}", dtype, (size, 2)),), dtype, f"family{i // family}")
        for i, size in enumerate(sizes)
    ]


@given(SIZES, st.integers(1, 5), st.integers(1, 3))
def test_every_unit_has_one_owner_and_families_stay_together(sizes: list[int], ranks: int, family: int) -> None:
    made = units(sizes, family)
    found = shares(made, range(ranks))
    assert sorted(u.parameters for own in found.values() for u in own) == sorted(u.parameters for u in made)
    owners = {unit.family: {o for o, own in found.items() if unit in own} for unit in made}
    assert all(len(of_family) == 1 for of_family in owners.values())
    for own in found.values():
        runs = [name for name, _ in groupby(unit.family for unit in own)]
        assert len(runs) == len(set(runs))


@given(SIZES, st.integers(1, 5))
def test_no_owner_has_more_than_another_and_one_family(sizes: list[int], ranks: int) -> None:
    made = units(sizes)
    loads = [sum(unit.nbytes for unit in own) for own in shares(made, range(ranks)).values()]
    assert max(loads) - min(loads) <= max((unit.nbytes for unit in made), default=0)


def test_wide_types_come_first() -> None:
    made = [*units([3], dtype=torch.bfloat16), *units([5])]
    (own,) = shares([made[0], Unit(("q",), made[1].outputs, torch.float32, "vectors")], [0]).values()
    assert [unit.outputs[0].dtype for unit in own] == [torch.float32, torch.bfloat16]


@given(SIZES, st.integers(1, 60))
def test_buckets_keep_the_order_and_cut_by_rows(sizes: list[int], rows: int) -> None:
    room = rows * 8
    made = units(sizes)
    pieces = [piece for bucket in buckets(made, room, by_rows=True) for piece in bucket]
    covered = [(p.unit.parameters[0], row) for p in pieces for row in range(p.start, whole(p.unit, p.stop))]
    assert covered == [(unit.parameters[0], row) for unit in made for row in range(unit.outputs[0].shape[0])]
    assert all(sum(p.nbytes for p in bucket) <= room for bucket in buckets(made, room, by_rows=True))
    uncut = buckets(made, room, by_rows=False)
    assert [p.unit for bucket in uncut for p in bucket] == made
    assert all(sum(p.nbytes for p in bucket) <= room or len(bucket) == 1 for bucket in uncut)


def whole(unit: Unit, stop: int | None) -> int:
    return unit.outputs[0].shape[0] if stop is None else stop
