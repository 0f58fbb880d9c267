"""Linear layers with a second copy of their weights in oneDNN's layout, for float32 on a CPU. Imports torch.

A decode step multiplies few rows by large matrices, and the ordinary product arranges the matrix anew each time. Here
that is done once per load. SGLang announces each change of weights, before and after it:

    load: restore(layer) ──► weights change ──► pack(layer) ──► apply(layer, rows)

so a layer has a packed copy only of the weights that it holds. A version that is staged in a shadow of the model packs
the shadow's layers; the exchange of weights exchanges the copies too (`COPY` in shadow_model.py).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from agentrl.engine.prepared.shadow_model import COPY

FEW_ROWS = 4
"""Fewer rows than this are faster by the ordinary product, which then reads the matrix once as it is."""
MOST_BYTES = 3 << 30
"""Memory for copies, those of staged versions included. Further layers use the ordinary product."""
ROWS_HINT = 16
UNQUANTIZED_HEAD = "UnquantizedEmbeddingMethod"
"""SGLang's method of heads and embeddings. An adapter's layer around a head has none."""
MATRIX = 2
"""Dimensions of the weights and rows that are multiplied."""


class Packed:
    """A weight in oneDNN's layout. It is not a tensor to those who look for the tensors of a model."""

    __slots__ = ("__weakref__", "size_bytes", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
        self.size_bytes = weight.nbytes

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x · weightᵀ + bias."""
        made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return made


class PackedLinears:
    """The packed copies of a process. Its methods make functions that replace those of SGLang."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._copies: WeakSet[Packed] = WeakSet()
        self._lock = Lock()  # a version may be staged in a thread while a head is first used

    def after_loading(self, stock: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """`process_weights_after_loading` of linear layers: packs the layer."""

        def process(method: Any, layer: Any) -> None:
            stock(method, layer)
            self.pack(layer)

        return process

    def after_loading_head(self, stock: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """`process_weights_after_loading` of embeddings: packs those that have been used as a head."""

        def process(method: Any, layer: Any) -> None:
            stock(method, layer)
            if hasattr(layer, COPY):
                self.pack(layer)

        return process

    def before_loading(self, stock: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """`restore_weights_before_loading`: drops the layer's copy."""

        def restore(method: Any, layer: Any) -> None:
            if hasattr(layer, COPY):
                setattr(layer, COPY, None)
            stock(method, layer)

        return restore

    def apply(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`apply` of linear layers: uses the layer's copy."""

        def multiply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            packed = usable(layer, x)
            return stock(method, layer, x, bias) if packed is None else packed.product(x, bias)

        return multiply

    def head(self, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`_compute_lm_head`: uses the copy of a head without bias and adapter, which its first use packs."""

        def compute(
            processor: Any, x: Tensor, head: Any, bias: Tensor | None = None, *, out: Tensor | None = None
        ) -> Any:
            if bias is None and type(getattr(head, "quant_method", None)).__name__ == UNQUANTIZED_HEAD:
                if not hasattr(head, COPY):
                    self.pack(head)
                if (packed := usable(head, x)) is not None:
                    return packed.product(x, None)
            return stock(processor, x, head, bias, out=out)

        return compute

    def pack(self, layer: Any) -> None:
        """Copy the weights of a layer, if they are float32 on a CPU and there is memory for it."""
        setattr(layer, COPY, None)
        weight = layer.weight
        is_matrix = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.ndim == MATRIX
        if not is_matrix or not weight.is_contiguous():
            return
        with self._lock:
            used = sum(packed.size_bytes for packed in self._copies)
            if used + weight.nbytes <= self._most_bytes:
                packed = Packed(weight)
                self._copies.add(packed)
                setattr(layer, COPY, packed)


def usable(layer: Any, x: Tensor) -> Packed | None:
    """The copy of a layer, where the product with it is faster."""
    packed: Packed | None = getattr(layer, COPY, None)
    if packed is None or x.ndim != MATRIX or len(x) < FEW_ROWS or x.dtype != torch.float32:
        return None
    return packed
