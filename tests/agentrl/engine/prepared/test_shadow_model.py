"""A second set of tensors: loads reach it alone, and an exchange makes it the one in use."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agentrl.engine.prepared.shadow_model import Shadow, UnlikeTensors, fingerprint, reachable


def no_rest() -> None:
    """A pace without rests."""


class Layer(nn.Module):
    """A fused layer with a loader bound to it, as SGLang's are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3), requires_grad=False)
        self.weight.weight_loader = self.load
        self.register_buffer("table", torch.ones(2))
        self.loads = 0

    def load(self, parameter: nn.Parameter, loaded: Tensor, half: int) -> None:
        self.loads += 1
        parameter.data.narrow(0, 2 * half, 2).copy_(loaded)


class Model(nn.Module):
    """Two layers, one of them tied to a second name, with a cache of its parameters and a derived tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Layer()
        self.head = self.embed
        self.layers = nn.ModuleList([Layer()])
        self.norm = nn.Parameter(torch.ones(3), requires_grad=False)
        self.derived = torch.zeros(3)
        self.loaders = {"norm": functools.partial(self.load_norm, 1.0), "names": ("a", 1)}
        self._cached_params_dict = dict(self.named_parameters())

    def load_norm(self, scale: float, loaded: Tensor) -> None:
        self.norm.data.copy_(loaded * scale)
        self.derived = loaded + 1

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load_norm: Any = self.loaders["norm"]
        for name, tensor in weights:
            if name == "norm":
                load_norm(tensor)
                continue
            parameter: Any = self._cached_params_dict[name.removesuffix(".0").removesuffix(".1")]
            parameter.weight_loader(parameter, tensor, int(name[-1]))


def values(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in reachable(model).items()}


def test_a_load_reaches_the_shadow_alone() -> None:
    model = Model()
    before, sums = values(model), fingerprint(model, no_rest)
    shadow = Shadow(model)
    shadow.refresh(no_rest)
    assert values(shadow.model) == before
    shadow.model.load_weights([("embed.weight.1", torch.full((2, 3), 7.0)), ("norm", torch.full((3,), 5.0))])
    shadow.check(no_rest)
    assert values(model) == before
    assert fingerprint(model, no_rest) == sums != fingerprint(shadow.model, no_rest)
    assert (model.embed.loads, shadow.model.embed.loads) == (0, 1)
    assert shadow.model.head is shadow.model.embed
    assert shadow.model.loaders["names"] == ("a", 1)


def test_an_exchange_makes_the_loaded_values_those_in_use() -> None:
    model = Model()
    shadow = Shadow(model)
    old, parameter = values(model), model.embed.weight
    shadow.refresh(no_rest)
    shadow.model.load_weights([("embed.weight.1", torch.full((2, 3), 7.0)), ("norm", torch.full((3,), 5.0))])
    shadow.check(no_rest)
    new = values(shadow.model)
    addresses = {parameter.data_ptr(), shadow.model.embed.weight.data_ptr()}
    with torch.inference_mode():  # as in SGLang's scheduler
        shadow.exchange()
    assert values(model) == new != old
    assert values(shadow.model) == old
    assert model.embed.weight is parameter
    assert model.derived.tolist() == [6.0] * 3
    assert {parameter.data_ptr(), shadow.model.embed.weight.data_ptr()} == addresses  # nothing was copied


def test_the_memory_of_the_old_values_takes_the_next_version() -> None:
    """A tensor that a version lacks keeps the value in use."""
    model = Model()
    shadow = Shadow(model)
    for step in (1.0, 2.0, 3.0):
        shadow.refresh(no_rest)
        name = "norm" if step == 2.0 else "embed.weight.0"
        shadow.model.load_weights([(name, torch.full((3,) if step == 2.0 else (2, 3), step))])
        shadow.check(no_rest)
        shadow.exchange()
    assert model.embed.weight[0].tolist() == [3.0] * 3
    assert model.norm.tolist() == [2.0] * 3


def test_views_of_one_storage_move_together() -> None:
    model = Model()
    model.transposed = model.embed.weight.data.t()
    shadow = Shadow(model)
    shadow.refresh(no_rest)
    shadow.model.load_weights([("embed.weight.0", torch.full((2, 3), 7.0))])
    assert reachable(shadow.model)[".transposed"][0].tolist() == [7.0, 7.0, 6.0, 9.0]
    shadow.check(no_rest)
    shadow.exchange()
    assert model.transposed.data_ptr() == model.embed.weight.data_ptr()
    assert model.transposed.tolist() == model.embed.weight.t().tolist()


def test_values_are_copied_where_something_else_refers_to_a_storage() -> None:
    model = Model()
    outside = model.embed.weight.data
    shadow = Shadow(model)
    shadow.refresh(no_rest)
    shadow.model.load_weights([("embed.weight.0", torch.full((2, 3), 7.0))])
    shadow.check(no_rest)
    shadow.exchange()
    assert outside.tolist() == model.embed.weight.tolist()
    assert outside[0].tolist() == [7.0] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "norm", nn.Parameter(torch.ones(4))),
        lambda model: setattr(model, "norm", nn.Parameter(torch.ones(3, dtype=torch.bfloat16))),
        lambda model: setattr(model, "extra", torch.ones(3)),
        lambda model: delattr(model, "derived"),
    ],
    ids=["shape", "type", "more", "fewer"],
)
def test_tensors_without_a_counterpart_are_refused(change: Any) -> None:
    model = Model()
    shadow = Shadow(model)
    shadow.refresh(no_rest)
    change(shadow.model)
    with pytest.raises(UnlikeTensors):
        shadow.check(no_rest)


def test_a_loaded_tensor_that_shares_memory_with_one_in_use_is_refused() -> None:
    model = Model()
    shadow = Shadow(model)
    shadow.refresh(no_rest)
    shadow.model.norm = nn.Parameter(model.norm.data, requires_grad=False)
    shadow.model._cached_params_dict["norm"] = shadow.model.norm
    with pytest.raises(UnlikeTensors, match="share memory"):
        shadow.check(no_rest)
