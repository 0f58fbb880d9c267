"""Products with packed copies are the ordinary ones, and a copy is never used for other weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from agentrl.engine.prepared.shadow_model import COPY, Shadow
from agentrl.engine.sglang.cpu.packed_linears import FEW_ROWS, PackedLinears, usable

WIDE, NARROW = 24, 16


class Method:
    """SGLang's method of unquantized layers, as far as it matters here."""

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def restore_weights_before_loading(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.weight, bias)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, NARROW), requires_grad=False)


@pytest.fixture
def linears() -> PackedLinears:
    return PackedLinears()


def load(linears: PackedLinears, layer: Layer) -> None:
    """Give a layer other weights, as SGLang does."""
    linears.before_loading(Method.restore_weights_before_loading)(Method(), layer)
    assert getattr(layer, COPY, None) is None
    layer.weight.data.copy_(torch.randn(WIDE, NARROW))
    linears.after_loading(Method.process_weights_after_loading)(Method(), layer)


@pytest.mark.parametrize("rows", [1, FEW_ROWS - 1, FEW_ROWS, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_the_ordinary_ones_after_each_load(linears: PackedLinears, rows: int, has_bias: bool) -> None:
    layer, x, bias = Layer(), torch.randn(rows, NARROW), torch.randn(WIDE) if has_bias else None
    for _ in range(3):
        load(linears, layer)
        assert (usable(layer, x) is not None) == (rows >= FEW_ROWS)
        found = linears.apply(Method.apply)(Method(), layer, x, bias)
        torch.testing.assert_close(found, linear(x, layer.weight, bias))


def test_what_is_not_float32_or_has_no_room_is_not_packed() -> None:
    layer = Layer()
    size = layer.weight.nbytes
    linears = PackedLinears(2 * size)
    layers = [Layer() for _ in range(3)]
    for one in layers:
        linears.pack(one)
    assert [getattr(one, COPY) is not None for one in layers] == [True, True, False]
    load(linears, layers[0])
    layers.pop(1)
    load(linears, layer)
    assert getattr(layer, COPY) is not None, "a copy that is gone makes room"
    layer.weight = nn.Parameter(layer.weight.to(torch.bfloat16), requires_grad=False)
    linears.pack(layer)
    assert getattr(layer, COPY) is None


class UnquantizedEmbeddingMethod(Method):
    """Has the name of SGLang's."""


def stock_head(
    processor: Any, x: Tensor, head: Any, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    return torch.matmul(x, head.weight.T)


def test_a_head_is_packed_when_it_is_first_used_and_after_each_load(linears: PackedLinears) -> None:
    embedding: Any = Layer()
    x, head = torch.randn(8, NARROW), linears.head(stock_head)
    embedding.quant_method = UnquantizedEmbeddingMethod()
    process = linears.after_loading_head(Method.process_weights_after_loading)
    process(Method(), embedding)
    assert not hasattr(embedding, COPY), "an embedding that is no head"
    torch.testing.assert_close(head(None, x, embedding), stock_head(None, x, embedding))
    assert usable(embedding, x) is not None
    linears.before_loading(Method.restore_weights_before_loading)(Method(), embedding)
    embedding.weight.data.copy_(torch.randn(WIDE, NARROW))
    torch.testing.assert_close(head(None, x, embedding), stock_head(None, x, embedding))
    process(Method(), embedding)
    assert usable(embedding, x) is not None
    torch.testing.assert_close(head(None, x, embedding), stock_head(None, x, embedding))


def test_heads_of_other_kinds_are_left_alone(linears: PackedLinears) -> None:
    head = SimpleNamespace(weight=torch.randn(WIDE, NARROW), quant_method=Method())
    linears.head(stock_head)(None, torch.randn(8, NARROW), head)
    assert not hasattr(head, COPY)


def test_an_exchange_exchanges_the_copies(linears: PackedLinears) -> None:
    live: Any = nn.ModuleList([Layer(), Layer()])
    x, apply = torch.randn(8, NARROW), linears.apply(Method.apply)
    for layer in live:
        linears.pack(layer)
    shadow = Shadow(live)
    for _ in range(3):
        before = [layer.weight.clone() for layer in live]
        shadow.refresh(lambda: None)
        for layer in shadow.model:
            assert isinstance(layer, Layer)
            load(linears, layer)
        for layer, weight in zip(live, before, strict=True):
            torch.testing.assert_close(apply(Method(), layer, x), linear(x, weight))
        shadow.check(lambda: None)
        shadow.exchange()
        for layer, weight in zip(live, before, strict=True):
            assert not torch.equal(layer.weight, weight)
            assert usable(layer, x) is not None
            torch.testing.assert_close(apply(Method(), layer, x), linear(x, layer.weight))


def test_a_head_that_was_first_used_after_the_shadow_was_made_gets_the_new_weights(linears: PackedLinears) -> None:
    live: Any = nn.ModuleList([Layer()])
    live[0].quant_method = UnquantizedEmbeddingMethod()
    x, head = torch.randn(8, NARROW), linears.head(stock_head)
    process = linears.after_loading_head(Method.process_weights_after_loading)
    shadow: Any = Shadow(live)
    for _ in range(3):
        shadow.refresh(lambda: None)
        linears.before_loading(Method.restore_weights_before_loading)(Method(), shadow.model[0])
        shadow.model[0].weight.data.copy_(torch.randn(WIDE, NARROW))
        process(Method(), shadow.model[0])
        torch.testing.assert_close(head(None, x, live[0]), stock_head(None, x, live[0]))
        shadow.check(lambda: None)
        shadow.exchange()
        torch.testing.assert_close(head(None, x, live[0]), stock_head(None, x, live[0]))
    assert usable(live[0], x) is not None
