"""Where a loader puts a checkpoint's tensors: fused matrices, padded rows, shards."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import pytest
import torch

from agentrl.engine.vllm.held_weights import HeldWeights, Recorder

Tensors = dict[str, torch.Tensor]


class Model(torch.nn.Module):
    """A fused matrix, a padded one, and one of which this rank has half of the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(8, 4))
        self.embed = torch.nn.Parameter(torch.zeros(6, 4))
        self.down = torch.nn.Parameter(torch.zeros(4, 3))
        self.scale = torch.nn.Parameter(torch.zeros(4))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        rows = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}
        for name, tensor in tensors:
            if name in rows:
                self.qkv.data.narrow(0, *rows[name]).copy_(tensor)
            elif name == "embed":
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)
            elif name == "down":
                self.down.data.copy_(tensor.narrow(1, 3, 3))
            elif name == "scale":
                self.scale.data.copy_(tensor * 2)


def checkpoint(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "embed": (5, 4), "down": (4, 6), "lm_head.weight": (5, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def recorded(model: Model, tensors: Tensors) -> HeldWeights:
    with Recorder(model) as recorder:
        model.load(recorder.beginning(tensors.items()))
    return HeldWeights.of(recorder, model)


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_new_tensors_take_the_place_of_the_old_as_if_they_had_been_loaded() -> None:
    model, expected, new = Model(), Model(), checkpoint(2)
    held = recorded(model, checkpoint(1))
    expected.load(new.items())
    assert held.problem(shapes(new)) is None
    assert held.differing("k", new["k"])
    for name, tensor in new.items():
        held.put(name, tensor.to(torch.float64) if name == "q" else tensor)
        assert not held.differing(name, tensor)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name


def test_digests_are_those_of_the_file_and_of_the_models_own_parameters() -> None:
    model, tensors = Model(), checkpoint(3)
    found = recorded(model, tensors).digests(model)

    def digest(*parts: torch.Tensor) -> str:
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:16]

    assert {name: found[name] for name in ("q", "k", "v", "embed")} == {
        name: digest(tensors[name]) for name in ("q", "k", "v", "embed")
    }
    assert found["qkv"] == digest(tensors["q"], tensors["k"], tensors["v"])
    assert "lm_head.weight" not in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"lm_head.weight": torch.zeros(5, 4)}, None),
        ({"other": torch.zeros(1)}, "the model has no tensor other"),
        ({"k": torch.zeros(4, 2)}, r"k has shape \[4, 2\], the model's has \[2, 4\]"),
        ({"scale": torch.zeros(4)}, "scale cannot be changed in place: its loader converts it"),
        ({"bias": torch.zeros(4)}, "bias has no place of its own"),
    ],
)
def test_other_tensors_than_the_models_are_refused(change: Tensors, said: str | None) -> None:
    held = recorded(Model(), checkpoint(1) | {"scale": torch.ones(4), "bias": torch.ones(4)})
    problem = held.problem(shapes({"q": torch.zeros(4, 4)} | change))
    assert (problem is None) if said is None else re.search(said, problem or "")


def test_a_folder_without_tensors_is_refused() -> None:
    assert recorded(Model(), checkpoint(1)).problem({}) == "it has no tensors"


def test_a_parameter_that_was_replaced_after_the_load_cannot_be_changed() -> None:
    model = Model()
    with Recorder(model) as recorder:
        model.load(recorder.beginning(checkpoint(1).items()))
    model.embed = torch.nn.Parameter(model.embed.data * 1)
    held = HeldWeights.of(recorder, model)
    assert "converted copy" in str(held.problem({"embed": (5, 4)}))
    assert held.problem({"q": (4, 4)}) is None
