"""Sampled tokens out of the loss: the pass that trains their trajectory measures their logprob and entropy as well.

P: distinct predictions of a microbatch's loss tokens, M: such tokens of it, E: predictions that only these need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

Keys = np.ndarray[Any, np.dtype[np.float64]]
"""(tokens, 3): the node that predicts a token, the token, the temperature."""
Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class MaskedOutputs:
    """The M tokens of one microbatch."""

    sources_E: Tensor  # int64, the node whose hidden state predicts
    targets_E: Tensor  # int64, the token predicted
    temperatures_E: Tensor  # float32
    predictions_M: Tensor  # int64, the prediction of each token: one of P, or P + one of E
    trajectories_M: Tensor  # int64, its trajectory, as `Microbatch.trajectories_S`
    sources: Places  # (E,) sources_E on the host

    @classmethod
    def of(cls, further: Keys, predictions: Places, trajectories: Places) -> Self:
        """The tensors, from the keys that only these tokens need."""
        return cls(
            torch.from_numpy(further[:, 0].astype(np.int64)),
            torch.from_numpy(further[:, 1].astype(np.int64)),
            torch.from_numpy(further[:, 2].astype(np.float32)),
            torch.from_numpy(predictions),
            torch.from_numpy(trajectories),
            further[:, 0].astype(np.int64),
        )

    def to(self, device: torch.device) -> MaskedOutputs:
        """The same tokens on `device`."""
        moved: dict[str, Any] = {
            n: on_device(x, device) for n in self.__slots__ if isinstance(x := getattr(self, n), Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class MeasuredOutputs:
    """The M tokens of one microbatch after its forward pass."""

    logprobs_M: Tensor
    entropy_M: Tensor
    trajectories_M: Tensor  # int64


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. The copy to a GPU starts from pinned memory and is not waited for."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=True)


def distinct_predictions(trained: Keys, masked: Keys) -> tuple[Keys, int, Places]:
    """The distinct keys, those of trained tokens first; how many those are; the place of each token's key. Without
    trained tokens there is one unused key: every rank must run the head.
    """
    if not len(trained):
        assert not len(masked)
        return np.array([[0.0, 0.0, 1.0]]), 1, np.empty(0, np.int64)
    found, inverse = np.unique(np.concatenate([trained, masked]), axis=0, return_inverse=True)
    places = inverse.reshape(-1)
    is_trained = np.zeros(len(found), np.bool_)
    is_trained[places[: len(trained)]] = True
    order = np.argsort(~is_trained, kind="stable")
    moved = np.empty(len(found), np.int64)
    moved[order] = np.arange(len(found))
    return found[order], int(is_trained.sum()), moved[places]
