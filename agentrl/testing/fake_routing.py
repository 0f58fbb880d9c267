"""The experts that the fake engine reports: a fixed function of token, position, layer and weight version."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.domain.experts.routed_experts import RoutingShape


def chosen_experts(
    tokens: Sequence[int], versions: Sequence[int], shape: RoutingShape, first: int = 0
) -> NDArray[np.int32]:
    """(R, layers, top_k) the experts of R positions from `first` on, whose `tokens` were computed by `versions`."""
    ids_R, versions_R = np.array(tokens, np.int64), np.array(versions, np.int64)
    token_R = 31 * ids_R + 17 * (first + np.arange(len(ids_R))) + 7 * versions_R
    best_RL = token_R[:, None] + 13 * np.arange(shape.layers)
    found: NDArray[np.int32] = ((best_RL[..., None] + np.arange(shape.top_k)) % shape.experts).astype(np.int32)
    return found


def as_reported(experts: NDArray[np.int32]) -> str:
    """The experts as SGLang reports them: base64 of little-endian int32."""
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()
