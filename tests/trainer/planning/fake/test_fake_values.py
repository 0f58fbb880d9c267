"""Integers of fake tensors: which stay known through an operation, and what stands for those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from agentrl.trainer.planning.fake import fake_values
from agentrl.trainer.planning.fake.fake_values import FakeValues

aten = torch.ops.aten


class Fakes:
    """Fake tensors of the CPU, and what is known of them."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = FakeValues(self.mode, torch.device("cpu"))

    def known(self, *numbers: Any) -> Tensor:
        """A fake tensor that came from the CPU."""
        return self.values.moved(torch.tensor(numbers), None)

    def unknown(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def run(self, operation: Any, *arguments: Any, **settings: Any) -> Any:
        """Compute with fake tensors, as the accelerator does."""
        with self.mode:
            result = operation(*arguments, **settings)
        self.values.follow(operation, arguments, settings, result)
        return result

    def of(self, tensor: Tensor) -> Any:
        """The values as a list; None when they are not known."""
        found = self.values.of(tensor)
        return None if found is None else found.tolist()


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


def test_integers_that_come_from_the_cpu_are_known_and_other_numbers_are_not(fakes: Fakes) -> None:
    assert fakes.of(fakes.known(1, 2)) == [1, 2]
    assert fakes.of(fakes.known(True, False)) == [True, False]
    assert fakes.of(fakes.known(1.0)) is None
    assert fakes.of(fakes.values.moved(torch.tensor([1, 2]), torch.float32)) is None
    assert fakes.of(fakes.values.moved(torch.tensor([1, 0]), torch.bool)) == [True, False]
    real = torch.tensor([0.5])
    assert fakes.values.of(real) is real


def test_the_values_of_a_tensor_do_not_change_with_the_cpus_tensor(fakes: Fakes) -> None:
    source = torch.tensor([1, 2])
    moved = fakes.values.moved(source, None)
    source[0] = 9
    assert fakes.of(moved) == [1, 2]
    fakes.values.copied(moved, None)[0] = 9
    assert fakes.of(moved) == [1, 2]


def test_values_of_a_large_tensor_are_not_kept(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_values, "MOST", 2)
    assert fakes.of(fakes.known(1, 2)) == [1, 2]
    assert fakes.of(fakes.known(1, 2, 3)) is None
    assert fakes.of(fakes.run(aten.repeat.default, fakes.known(1, 2), [2])) is None


def test_a_number_that_is_not_known_is_0_and_true_as_a_truth_value(fakes: Fakes) -> None:
    assert fakes.values.number(fakes.known(7)) == 7
    assert fakes.values.number(fakes.unknown(1)) == 0
    assert fakes.values.number(fakes.unknown(1, dtype=torch.float32)) == 0.0
    assert fakes.values.number(fakes.unknown(1, dtype=torch.bool)) is True


def test_a_copy_on_the_cpu_has_the_known_values_or_zeros(fakes: Fakes) -> None:
    assert fakes.values.copied(fakes.known(3, 0), torch.float32).tolist() == [3.0, 0.0]
    assert fakes.values.copied(fakes.known(3, 0), None).dtype == torch.int64
    assert fakes.values.copied(fakes.unknown(2), torch.int32).tolist() == [0, 0]
    assert fakes.values.copied(fakes.unknown(2, dtype=torch.bool), None).tolist() == [True, True]


def test_masks_become_the_places_of_their_true_values(fakes: Fakes) -> None:
    source, index = fakes.unknown(3, 4), fakes.known(1, 2)
    masks = [fakes.known(False, True, True), fakes.unknown(2, dtype=torch.bool), torch.tensor([True, False])]
    given, found, behind = fakes.values.known_indices((source, [*masks, index, None], "behind"))
    assert given is source
    assert behind == "behind"
    assert [None if one is None else fakes.of(one) for one in found] == [[1, 2], [0, 1], [0], [1, 2], None]


def test_a_mask_of_two_dimensions_becomes_two_indices(fakes: Fakes) -> None:
    mask = fakes.values.moved(torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8), None)
    _, found = fakes.values.known_indices((fakes.unknown(2, 2), [mask]))
    assert [fakes.of(one) for one in found] == [[0, 1], [1, 0]]


def test_an_operation_on_known_integers_has_known_integers(fakes: Fakes) -> None:
    assert fakes.of(fakes.run(aten.cumsum.default, fakes.known(1, 2, 3), 0)) == [1, 3, 6]
    assert fakes.of(fakes.run(aten.arange.default, 3, device=torch.device("cpu"))) == [0, 1, 2]
    assert fakes.of(fakes.run(aten.lt.Scalar, fakes.known(1, 5), 3)) == [True, False]
    assert fakes.of(fakes.run(aten.mul.Scalar, fakes.known(1, 5), 0.5)) is None
    assert fakes.of(fakes.run(aten.add.Tensor, fakes.known(1, 2), fakes.unknown(2))) is None
    assert fakes.run(aten.size.default, fakes.known(1, 2)) == [2]


def test_a_histogram_of_integers_is_counted_as_a_gpu_counts_it(fakes: Fakes) -> None:
    counts = fakes.unknown(4)  # a fake CPU counts no integers
    fakes.values.follow(aten.histc.default, (fakes.known(0, 2, 2, 3), 4, 0, 3), {}, counts)
    assert fakes.of(counts) == [1, 0, 2, 1]


def test_what_is_written_into_a_tensor_is_seen_through_its_views(fakes: Fakes) -> None:
    whole = fakes.known(1, 2, 3, 4)
    half = fakes.run(aten.slice.Tensor, whole, 0, 0, 2)
    fakes.run(aten.add_.Tensor, half, fakes.known(10, 10))
    assert fakes.of(whole) == [11, 12, 3, 4]
    fakes.run(aten.add_.Tensor, half, fakes.unknown(2))
    assert fakes.of(half) is None
    assert fakes.of(whole) is None


def test_the_choices_of_a_router_go_round_all_experts(fakes: Fakes) -> None:
    scores = fakes.unknown(3, 4, dtype=torch.float32)
    _, chosen = fakes.run(aten.topk.default, scores, 2)
    assert fakes.of(chosen) == [[0, 1], [2, 3], [0, 1]]
    _, order = fakes.run(aten.sort.default, fakes.unknown(4, 2, dtype=torch.float32), 0)
    assert fakes.of(order) == [[0, 1], [2, 3], [0, 1], [2, 3]]
    _, order = fakes.run(aten.sort.default, fakes.unknown(3, dtype=torch.float32), -1, True)
    assert fakes.of(order) == [0, 1, 2]
    _, order = fakes.run(aten.sort.stable, fakes.unknown(3, dtype=torch.float32), stable=True)
    assert fakes.of(order) == [0, 1, 2]


def test_known_integers_are_sorted(fakes: Fakes) -> None:
    values, order = fakes.run(aten.sort.default, fakes.known(3, 1, 2))
    assert (fakes.of(values), fakes.of(order)) == ([1, 2, 3], [1, 2, 0])


@pytest.mark.parametrize(("sent", "received"), [("known", [5, 6]), ("unknown", None), ("numbers", None)])
def test_ranks_receive_the_integers_that_this_rank_sends(fakes: Fakes, sent: str, received: list[int] | None) -> None:
    sending = {
        "known": fakes.known(5, 6),
        "unknown": fakes.unknown(2),
        "numbers": fakes.unknown(2, dtype=torch.float32),
    }[sent]
    receiving = fakes.unknown(2, dtype=sending.dtype)
    fakes.values.follow(torch.ops.c10d.alltoall_base_.default, (receiving, sending, None, [], []), {}, None)
    assert fakes.of(receiving) == received
