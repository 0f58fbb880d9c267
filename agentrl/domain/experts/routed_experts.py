"""The experts that an engine chose for tokens, and what is known of the pass that chose them.

R: positions of a sequence, L: decoder layers, k: experts of a token in one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations of transformers have for the number of routed experts."""
MAX_EXPERTS = 1 << 15
"""The trainer has expert ids as int16."""


class RouteOrigin(IntEnum):
    """Where the experts of a position come from."""

    MISSING = 0  # the engine reported none: the trainer's own router chooses
    RECORDED = 1  # from the one pass that computed the position
    RECOMPUTED = 2  # from one of several passes over the position, which may have chosen other experts


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The sizes of a model's routing."""

    layers: int  # decoder layers, those without experts included
    top_k: int
    experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RoutingShape | None:
        """The sizes in a model's `config.json`; None for a model without experts. Raises ValueError for sizes that
        cannot be recorded.
        """
        config = config.get("text_config") or config
        experts = next((config[name] for name in EXPERTS if config.get(name)), None)
        layers, top_k = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
        if not experts or not layers or not top_k:
            return None
        if not (0 < top_k <= experts <= MAX_EXPERTS and layers > 0):
            raise ValueError(f"its routing, {top_k} of {experts} experts in {layers} layers, cannot be recorded")
        return cls(layers, top_k, experts)

    @property
    def dtype(self) -> type[np.uint8 | np.uint16]:
        """The smallest type of expert ids."""
        return np.uint8 if self.experts <= 1 << 8 else np.uint16


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts of R consecutive positions. A position's experts in one layer are a set, in ascending order; they are
    0 where the origin is MISSING, and in layers without experts.
    """

    ids: NDArray[np.uint8 | np.uint16]  # (R, L, k)
    origins: NDArray[np.uint8]  # (R,) RouteOrigin

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or len(self.ids) != len(self.origins):
            raise ValueError(f"experts {self.ids.shape} and origins {self.origins.shape} do not match")

    def __len__(self) -> int:
        return len(self.origins)

    @classmethod
    def missing(cls, rows: int, layers: int, top_k: int, dtype: Any = np.uint8) -> RoutedExperts:
        """Positions without known experts."""
        return cls(np.zeros((rows, layers, top_k), dtype), np.zeros(rows, np.uint8))

    @classmethod
    def parse(cls, raw: bytes, shape: RoutingShape) -> RoutedExperts:
        """An engine's rows: (R, L, k) little-endian int32, each RECORDED.

        A row is MISSING when it names an expert twice in a layer that chooses among experts: engines report zeros for
        positions that they have not captured. With a top_k of 1 such a row looks like a choice.

        Raises ValueError for other sizes and for experts that the model does not have.
        """
        row_bytes = 4 * shape.layers * shape.top_k
        if len(raw) % row_bytes:
            raise ValueError(f"{len(raw)} bytes are no rows of {shape.layers} layers with {shape.top_k} experts")
        ids = np.frombuffer(raw, "<i4").reshape(-1, shape.layers, shape.top_k)
        if ids.size and not 0 <= ids.min() <= ids.max() < shape.experts:
            raise ValueError(f"experts {ids.min()} to {ids.max()} are not among the model's {shape.experts}")
        ids = np.sort(ids.astype(shape.dtype), axis=2)
        twice = (ids[..., 1:] == ids[..., :-1]).any(2)  # (R, L)
        chooses = ~twice.all(0)  # (L,) layers with experts
        known = ~(twice & chooses).any(1) & chooses.any()
        return cls(np.where(known[:, None, None], ids, 0).astype(shape.dtype), known.astype(np.uint8))

    def counts(self) -> dict[RouteOrigin, int]:
        """The number of positions of each origin."""
        found = np.bincount(self.origins, minlength=len(RouteOrigin))
        return {origin: int(found[origin]) for origin in RouteOrigin}


def mark_recomputed(origins: NDArray[np.uint8]) -> None:
    """Change RECORDED to RECOMPUTED, in place: another pass has computed these positions too."""
    origins[origins == RouteOrigin.RECORDED] = RouteOrigin.RECOMPUTED


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRouting:
    """The experts of one call's own positions, those from `start` to the one before its last output token.

    `start` is the last position of its parent's sequence, or 0 without a parent. An engine computes a last token only
    when a later call extends the sequence.
    """

    start: int
    computed_from: int  # positions before `start` from here on were computed again, by this call's passes
    experts: RoutedExperts
